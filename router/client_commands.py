"""Commands that the router answers itself or passes to members: the clients' front desk.

Spec: docs/protocol.md, "Commands".
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec.structs import replace

from rolloutbus.bus.wire.codec import pack, unpack, unpack_as
from rolloutbus.bus.wire.commands import COMMANDS, done_by, sent_by
from rolloutbus.bus.wire.counters import ROUTER_COUNTERS
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import (
    FleetOutcome,
    FleetStatus,
    LoadLora,
    Pause,
    Resume,
    Shutdown,
    StoreStatus,
    WorkerOutcome,
    WorkerStatus,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Abort, Aborted, AbortPolicy
from rolloutbus.bus.wire.messages.weights import ReserveVersion, RestoreVersion
from rolloutbus.bus.wire.validation import check_rid
from rolloutbus.router.context import Context, check_deadline, highest_taken, refusal
from rolloutbus.router.dispatch import Dispatcher
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.intents import Intents
from rolloutbus.router.members.member_commands import MemberCommands
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.placement.sessions import Sessions
from rolloutbus.router.requests.table import RequestTable
from rolloutbus.router.updates.publications import Publications

STORE_GRACE_S = 10.0
"""Weight commands wait so long for a store: longer than it needs to come back to a router that was
started again."""
MAX_AWAITING = 64
PASSED_ON = sent_by("admin") & done_by("worker", "engine", "store")
"""Commands of clients that members carry out."""
HELD = frozenset({Reason.PAUSED, Reason.INTENT_UNKNOWN})
"""Why a worker is asked to compute nothing."""
MAX_TOLD = 16


class _Awaiting(NamedTuple):
    """A command that waits for the store."""

    client: str
    entry: Entry
    deadline_at: float
    until: float


class ClientCommands:
    """Everything a client may ask for besides generation."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        dispatcher: Dispatcher,
        fleet: MemberCommands,
        publications: Publications,
        sessions: Sessions,
        *,
        intents: Intents,
    ) -> None:
        self._context = context
        self._table = table
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._publications = publications
        self._sessions = sessions
        self._intents = intents
        self._awaiting: dict[str, _Awaiting] = {}

    def tick(self, now: float) -> None:
        """Pass on what waited for a store, or refuse it."""
        store = self._context.members.store() if self._awaiting else None
        for rid, each in list(self._awaiting.items()):
            if store is not None:
                del self._awaiting[rid]
                left_ms = max(1, round(1000 * (each.deadline_at - now)))
                entry = replace(each.entry, deadline_ms=left_ms)
                entry = self._above_all(entry, unpack(entry))
                self._fleet.ask(each.client, entry, [store], now)
            elif each.until <= now:
                del self._awaiting[rid]
                message = "no weight store is connected; start one with `rolloutbus store`"
                self._context.refuse(each.client, rid, refusal("no_store", message, "route"))

    def abort(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """Stop requests of this client, or a publication."""
        body = unpack_as(Abort, entry)
        n_aborted = self._dispatcher.abort(client, body)
        n_aborted += self._publications.abort(client.name, body.rids, now)
        self._context.finish(client.name, entry.rid, pack(Aborted(n_aborted)))

    def abort_policy(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Stop the requests of all clients for a policy; clients are told, and do not resume them.

        A policy that nobody serves and nobody asks for is refused: its name may be misspelt.

        Raises:
            RemoteProtocolError: the body breaks its type.
        """
        body = unpack_as(AbortPolicy, entry)
        if self._context.is_recovering:
            return  # it does not know yet what runs; its client asks again
        for each in self._context.clients:
            self._context.to_client(each.name, Entry("policy_aborted", body=entry.body))
        n_aborted = self._dispatcher.abort_policy(body.policy)
        known = self._context.known_policies()
        if not n_aborted and known and body.policy not in known:
            problem = self._dispatcher.strangeness(body.policy, "policy")
            self._context.refuse(client.name, entry.rid, problem)
            return
        self._context.count("policies_aborted")
        self._context.finish(client.name, entry.rid, pack(Aborted(n_aborted)))

    def ask_members(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """Pass a command to one member or to all workers."""
        stranger = check_rid(entry.rid, client=client.name)
        if stranger is not None:  # first of all: the answers that are kept are their owners'
            self._context.refuse(client.name, entry.rid, stranger)
            return
        if entry.rid in self._awaiting or self._fleet.is_known(client.name, entry.rid):
            return
        body = unpack(entry)  # one that breaks its type is refused here, once, naming the field
        problem = check_deadline(entry)
        if problem is not None:
            self._context.refuse(client.name, entry.rid, problem)
            return
        targets = self._targets(entry.route)
        if targets is None and self._waits_for_store(entry):
            deadline_at = now + entry.deadline_ms / 1000
            until = min(deadline_at, now + STORE_GRACE_S)
            self._awaiting[entry.rid] = _Awaiting(client.name, entry, deadline_at, until)
        elif targets is None:
            if not (isinstance(body, Shutdown) and self._gives_up(client, entry, body)):
                self._context.refuse(client.name, entry.rid, self._nobody_at(entry.route))
        elif not self._fleet.has_room(len(targets)):
            problem = refusal("busy", "too many commands are under way", retry_after_ms=1000)
            self._context.refuse(client.name, entry.rid, problem)
        elif "paused" in COMMANDS[entry.kind].refused_in and (held := self._held(targets)):
            problem = refusal("not_ready", f"{held} is paused; send resume first", "route", 250)
            self._context.refuse(client.name, entry.rid, problem)
        elif isinstance(body, Pause | Resume):
            if self._intents.may_be_asked:  # else its client asks again
                self._intents.asked(body, entry.route, now)
                is_brought = entry.route == "fleet"
                self._fleet.ask(client.name, entry, targets, now, is_brought=is_brought)
        else:
            if isinstance(body, Shutdown):
                for each in targets:
                    self._context.expected.told_to_leave(each.name, comes_back=body.comes_back)
                entry = replace(entry, body=pack(Shutdown(body.drain)))
            entry = self._above_all(entry, body)
            self._fleet.ask(client.name, entry, targets, now, self._missed(entry, body))

    def _above_all(self, entry: Entry, body: object) -> Entry:
        """The entry; who wants a new number tells the store of those that its record lacks."""
        if not isinstance(body, ReserveVersion | RestoreVersion):
            return entry
        taken = highest_taken(self._context, body.policy)
        if taken <= self._context.recorded.get(body.policy, 0):
            return entry
        return replace(entry, body=pack(replace(body, above=max(body.above, taken))))

    def report(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """Answer `status`."""
        self._context.finish(client.name, entry.rid, pack(self.status(now)))

    def status(self, now: float) -> FleetStatus:
        """The router's table, for people and tools."""
        context = self._context
        workers = [self._worker_status(worker, now) for worker in context.members.workers()]
        return FleetStatus(
            context.router_epoch,
            context.instance,
            context.is_recovering,
            workers,
            dict(context.committed),
            len(self._table.waiting),
            sum(worker.n_running for worker in workers),
            sum(not client.is_router for client in context.clients),
            {**dict.fromkeys(ROUTER_COUNTERS, 0), **context.counters},
            self._sessions.places.counts(),
            dict(context.troubled),
            self._publications.under_way(now),
            context.intent.fleet,
            context.intent.pause,
            dict(context.intent.workers),
            context.expected.absent(),
            self._store_status(now),
            {policy: tags[-1][1] for policy, tags in context.tags.items()},
            self._standby(now),
        )

    def _standby(self, now: float) -> Literal["", "ready", "missing"]:
        context = self._context
        since = now - context.settings.leases.silence_s
        if any(client.is_router and client.seen_at >= since for client in context.clients):
            return "ready"
        return "" if context.settings.pair is None else "missing"

    def _gives_up(self, client: ClientRecord, entry: Entry, body: Shutdown) -> bool:
        """Stops expecting a worker that is away; returns whether that is what is asked for."""
        name = entry.route.removeprefix("worker:")
        if body.comes_back or not self._context.expected.forget(name):
            return False
        done = pack(Done("It was not here, and is not expected any more."))
        outcome = FleetOutcome([WorkerOutcome(name, "finished", done)], [])
        self._context.finish(client.name, entry.rid, pack(outcome))
        return True

    def _held(self, targets: Iterable[MemberRecord]) -> str:
        """Name of one that is to be paused, or might be; empty if none is."""
        return next((each.name for each in targets if each.blocked_by & HELD), "")

    def _missed(self, entry: Entry, body: object) -> list[str]:
        """Workers that are away, and will not do it when they come."""
        is_brought = isinstance(body, LoadLora) and not body.path  # out of the store
        is_missed = "missed" in COMMANDS[entry.kind].traits
        if entry.route != "fleet" or not is_missed or is_brought:
            return []
        return list(self._context.expected.absent())

    def _targets(self, route: str) -> list[MemberRecord] | None:
        members = self._context.members
        if route == "fleet":
            return members.workers()
        if route == "store":
            member = members.store()
        else:
            member = members.named(route.removeprefix("worker:"))
            if member is not None and member.role != "worker":
                member = None
        return [member] if member is not None else None

    def _nobody_at(self, route: str) -> Problem:
        if route == "store":
            return refusal("no_store", "no 'store' is connected", "route")
        names = sorted(each.name for each in self._context.members.workers())
        more = f", and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        there = f"there are {', '.join(names[:MAX_TOLD])}{more}" if names else "there is no worker"
        name = route.removeprefix("worker:")[:80]
        return refusal("unknown_worker", f"no worker {name!r} is connected; {there}", "route")

    def _waits_for_store(self, entry: Entry) -> bool:
        is_for_it = entry.route == "store" and COMMANDS[entry.kind].target == "store"
        return is_for_it and len(self._awaiting) < MAX_AWAITING

    def _store_status(self, now: float) -> StoreStatus | None:
        store = self._context.members.store()
        if store is None:
            return None
        age_ms = int((now - store.heartbeat_at) * 1000)
        return StoreStatus(store.name, age_ms, store.heartbeat.gauges, store.heartbeat.counters)

    def _worker_status(self, worker: MemberRecord, now: float) -> WorkerStatus:
        facts, heartbeat = worker.hello.worker, worker.heartbeat
        return WorkerStatus(
            worker.name,
            worker.epoch,
            worker.shown_state,
            worker.policy,
            worker.version,
            facts.engine if facts else "",
            facts.slots if facts else 0,
            len(worker.requests),
            heartbeat.n_tokens,
            int((now - worker.heartbeat_at) * 1000),
            heartbeat.stalled_ms,
            facts.pid if facts else 0,
            self._context.quarantine_of(worker),
            len(worker.marks) - len(worker.marks_expected),
            {reason.value: reason.sentence for reason in sorted(worker.blocked_by)},
            heartbeat.steps,
            heartbeat.free,
            len(worker.outbox) if heartbeat.n_outbox is None else heartbeat.n_outbox,
            heartbeat.counters,
            heartbeat.durations,
        )
