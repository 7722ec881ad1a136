"""The fleet's intent, which outlives its members: its identity, and which workers are paused.

Every member keeps a copy, and a weight store writes it down: a restarted router learns it from them
before it lets anybody serve who joins as new. Spec: docs/protocol.md, "Intent".
"""

from typing import Literal

import msgspec

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.limits import MAX_MEMBERS
from rolloutbus.bus.wire.messages.control import Pause, Paused, Resume
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Intent
from rolloutbus.router.context import Context
from rolloutbus.router.members.member_commands import MemberCommand, MemberCommands, Results
from rolloutbus.router.members.records import MemberRecord, Reason

Origin = Literal["", "router", "worker", "store"]
"""Whose word the fleet's identity is; a store's counts most."""

PAUSE_S = 120.0
"""A worker gets this long to carry out what it was found not to have done."""
RETRY_S = 2.0
"""Before a worker that did not is told again; also before it is told for the first time, so that
what clients asked for can end by itself."""
NAMELESS_S = 30.0
"""A fleet has no name so long after its router's start, unless somebody brings one. A second router
without the store of its fleet, started by mistake, names none before it is found out."""


class Intents:
    """Keeps `Context.intent`, and workers to it."""

    def __init__(self, context: Context, fleet: MemberCommands) -> None:
        self._context = context
        self._fleet = fleet
        self._origin: Origin = ""
        if context.settings.fleet:
            context.intent = msgspec.structs.replace(context.intent, fleet=context.settings.fleet)
            self._origin = "router"
        self._former_names: set[str] = set()
        """Identities that it gave the fleet before it heard of the store's record."""
        self._is_ours = False
        """The intent was asked of this router: what earlier ones were asked for is over."""
        self._has_predecessor = False
        self._under_way: dict[str, str] = {}
        """Worker -> rid of the command that it was sent to do what it has not done."""
        self._doubtful: dict[str, MemberRecord] = {}
        """Workers that may not follow the intent: it has changed since they did, or their state."""

    def problem_of(self, hello: Hello) -> str:
        """Why a store cannot be this fleet's; empty if it can."""
        mine, theirs = self._context.intent.fleet, _fleet_in(hello)
        if hello.role != "store" or self._origin != "store" or theirs in ("", mine):
            return ""
        return f"this store's record is of fleet {theirs}; this router holds fleet {mine}"

    def greeted(self, hello: Hello) -> None:
        """Somebody introduces themselves: they may know of a router before this one."""
        instance = self._context.instance
        self._has_predecessor |= hello.router_instance not in ("", instance)

    def joined(self, member: MemberRecord, now: float) -> None:
        """A member says hello, and brings the intent that it was sent last."""
        hello, context = member.hello, self._context
        self._judge(member)
        theirs, before = hello.intent, context.intent
        if member.role == "store":
            self._named(_fleet_in(hello) or before.fleet or context.instance, "store")
        elif theirs is not None and theirs.fleet and not before.fleet:
            self._named(theirs.fleet, "worker")
        member.is_foreign = self._is_foreign(member)
        if member.is_foreign:
            self.tell(member)
            return
        if theirs is not None and theirs.stamp > before.stamp and not self._is_ours:
            context.intent = msgspec.structs.replace(
                context.intent, stamp=theirs.stamp, pause=theirs.pause, workers=theirs.workers
            )
        is_witness = theirs is not None or member.role == "store"
        if context.intent != before or (is_witness and not context.knows_intent):
            context.knows_intent |= is_witness
            self._changed(now)
        else:
            self.tell(member)

    def tell(self, member: MemberRecord) -> None:
        """Tell one member, which has been welcomed."""
        if self._context.intent.stamp > Intent().stamp:
            self._context.to_member(member, "intent", pack(self._context.intent))

    def heard(self, member: MemberRecord, heartbeat: Heartbeat) -> None:
        """A heartbeat came: send the intent again if the member has an older one."""
        if heartbeat.state != member.heartbeat.state and member.role == "worker":
            self._doubtful[member.name] = member
        if heartbeat.intent != self._context.intent.stamp:
            self.tell(member)

    def lost(self, member: MemberRecord) -> None:
        """Its lease is over."""
        self._doubtful.pop(member.name, None)

    def outranked(self) -> None:
        """This router's epoch was raised: what it was asked for stays the latest."""
        epoch, n = self._context.intent.stamp
        if self._is_ours and epoch < self._context.router_epoch:
            stamp = (self._context.router_epoch, n)
            self._context.intent = msgspec.structs.replace(self._context.intent, stamp=stamp)

    @property
    def may_be_asked(self) -> bool:
        """Whether a pause would be added to all that is known of earlier ones."""
        return self._context.knows_intent or not self._context.is_recovering

    def asked(self, body: Pause | Resume, route: str, now: float) -> None:
        """A client pauses the fleet or one worker, or has it go on."""
        intent = self._context.intent
        mode: Paused = body.mode if isinstance(body, Pause) else ""
        if route == "fleet":
            pause, workers = mode, dict[str, Paused]()
        else:
            pause, workers = intent.pause, dict(intent.workers)
            name = route.removeprefix("worker:")
            workers.pop(name, None)
            if mode != pause:
                workers[name] = mode
            if len(workers) > MAX_MEMBERS:
                self._forget_gone(workers)
        self._is_ours = True
        if (pause, workers) != (intent.pause, intent.workers):
            self._set(pause=pause, workers=workers)
            self._changed(now)

    def tick(self, now: float) -> None:
        """Settle an intent that no member contradicts, and have workers follow it."""
        context = self._context
        if not context.knows_intent and (not context.is_recovering or self._is_new_fleet(now)):
            context.knows_intent = True
            self._judge_all()
        if context.is_recovering:
            return
        if context.intent.stamp == Intent().stamp:
            self._set()  # members that were told an intent are witnesses for the next router
            self._changed(now)
        if not context.intent.fleet and self._age_s(now) >= NAMELESS_S:
            self._named(context.instance, "router")
            self._changed(now)
        for worker in list(self._doubtful.values()):
            if self._follows(worker):
                del self._doubtful[worker.name]
            elif worker.retry_pause_at <= now and worker.state == "live":
                self._keep_to_it(worker, now)

    def _is_new_fleet(self, now: float) -> bool:
        """Whether this fleet is new: members of an earlier router would have come by now."""
        settings = self._context.settings.leases
        wait_s = settings.reconnect_max_s + settings.heartbeat_s
        return not self._has_predecessor and self._age_s(now) >= wait_s

    def _age_s(self, now: float) -> float:
        """Seconds since its first tick."""
        started_at = self._context.started_at
        return 0.0 if started_at is None else now - started_at

    def _follows(self, worker: MemberRecord) -> bool:
        wanted = self._context.intent.pause_of(worker.name)
        return bool(wanted) == (worker.heartbeat.state == "paused")

    def _keep_to_it(self, worker: MemberRecord, now: float) -> None:
        wanted, state = self._context.intent.pause_of(worker.name), worker.heartbeat.state
        if state not in ("ready", "paused") or worker.name in self._under_way:
            return
        facts, kind = worker.hello.worker, "pause" if wanted else "resume"
        if facts is None or kind not in facts.capabilities:
            return  # it is held here, and cannot be held there
        if self._fleet.is_asked(worker, ("pause", "resume")):
            return
        rid = self._context.next_name("intent")
        self._under_way[worker.name] = rid
        body = pack(Pause(wanted)) if wanted else pack(Resume())
        self._context.count("intents_brought")

        def done(_results: Results, _silent: list[str], at: float) -> None:
            self._under_way.pop(worker.name, None)
            worker.retry_pause_at = at + RETRY_S  # its next heartbeat says what came of it

        self._fleet.start(MemberCommand(rid, kind, body, now + PAUSE_S, done), [worker], now)

    def _named(self, fleet: str, origin: Origin) -> None:
        """The fleet's identity is known, or is that of the store's record after all."""
        former = self._context.intent.fleet
        if former and self._origin == "router":
            self._former_names.add(former)
        self._origin = origin
        if former != fleet:
            self._set(fleet=fleet)
        for worker in self._context.members.workers():
            worker.is_foreign = self._is_foreign(worker)

    def _is_foreign(self, member: MemberRecord) -> bool:
        known = {"", self._context.intent.fleet, *self._former_names}
        return member.role == "worker" and member.fleet not in known

    def _set(self, **changes: str | dict[str, Paused]) -> None:
        epoch, n = self._context.intent.stamp
        stamp = (max(epoch, self._context.router_epoch), n + 1)
        self._context.intent = msgspec.structs.replace(self._context.intent, stamp=stamp, **changes)

    def _changed(self, now: float) -> None:
        """Send all members the intent, and abandon the commands of the intent before."""
        for member in self._context.members:
            self.tell(member)
        for rid in self._under_way.values():
            self._fleet.abandon(rid)
        self._under_way.clear()
        for worker in self._context.members.workers():
            worker.retry_pause_at = now + RETRY_S
            self._doubtful[worker.name] = worker
        self._context.has_member_news = True
        self._judge_all()

    def _judge_all(self) -> None:
        for worker in self._context.members.workers():
            self._judge(worker)

    def _judge(self, member: MemberRecord) -> None:
        """Whether a worker is to be paused, or might be: it is new, as this router is."""
        if member.role == "worker":
            context, note = self._context, self._context.eligibility.note
            is_paused = bool(context.intent.pause_of(member.name))
            is_unknown = not context.knows_intent and member.hello.intent is None
            note(member, Reason.PAUSED, is_blocking=is_paused)
            note(member, Reason.INTENT_UNKNOWN, is_blocking=is_unknown)

    def _forget_gone(self, workers: dict[str, Paused]) -> None:
        for name in [name for name in workers if self._context.members.named(name) is None]:
            del workers[name]


def _fleet_in(hello: Hello) -> str:
    return hello.intent.fleet if hello.intent is not None else ""
