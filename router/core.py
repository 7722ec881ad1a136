"""The router's decisions: an event in, effects out; no socket, clock or chance of its own.

One table of members drives dispatch and control alike.
Spec: docs/protocol.md.
"""

from collections.abc import Callable
from typing import Any, assert_never

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.bus.wire.messages.endings import Accepted, Ack
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.router.client_commands import PASSED_ON, ClientCommands
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.dispatch import Dispatcher
from rolloutbus.router.events import (
    Counted,
    Effect,
    Event,
    KeysChanged,
    LettersKept,
    Malformed,
    Received,
    Returned,
    Revoked,
    Ticked,
)
from rolloutbus.router.executions import Executions
from rolloutbus.router.health.health import Health, engine_death, told_reason
from rolloutbus.router.health.suspicion import DeadLetter
from rolloutbus.router.members.authority import Authority, Offences
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.intents import Intents
from rolloutbus.router.members.key_handout import KeyHandout
from rolloutbus.router.members.member_commands import MemberCommands, is_share
from rolloutbus.router.members.membership import Membership
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.affinity import Affinity
from rolloutbus.router.placement.isolation import Isolation
from rolloutbus.router.placement.load import LoadStage
from rolloutbus.router.placement.pinned import Pinned
from rolloutbus.router.placement.placement import Placer
from rolloutbus.router.placement.prefixes import PrefixIndex
from rolloutbus.router.placement.sessions import Sessions
from rolloutbus.router.requests.admission_control import (
    AdmissionControl,
    Backlogs,
    HeaderValidation,
)
from rolloutbus.router.requests.reattachment import Reattachment
from rolloutbus.router.requests.table import RequestTable
from rolloutbus.router.settings import RouterSettings
from rolloutbus.router.updates.catch_ups import CatchUps
from rolloutbus.router.updates.publications import Publications, Reservations
from rolloutbus.router.updates.updates import Updates

Handlers = dict[str, Callable[[Any, Entry, float], None]]
"""kind -> what to do with (the sender's record, entry, now): one for clients, one for members."""

Runs = dict[str, Callable[[Any, list[Entry], int, float], int]]
"""kind -> what takes as many such entries as it can: (the sender's record, entries, index of the
first, now) -> index of the first that is left."""


class RouterCore:
    """The whole router without its sockets."""

    def __init__(self, settings: RouterSettings, instance: str, chance: Chance) -> None:
        self.context = Context(settings, instance)
        self._prefixes = PrefixIndex(self.context, chance)
        self.table = RequestTable(self.context)
        self._health = Health(self.context, self.table)
        self._isolation = Isolation(self.context, self._health.suspicions)
        self.affinity = affinity = Affinity(self.context)
        self._sessions = Sessions(self.context, self.table, affinity, self._prefixes, chance)
        stages = (
            self._isolation.choose,  # before sessions: a suspect has no company in its turn
            Pinned(self.context).choose,
            self._sessions.choose,
            affinity.choose,
            self._prefixes.choose,
            LoadStage(self.context, chance).choose,
        )
        self.placer = Placer(stages)
        admission = AdmissionControl(self.context, self.table, chance)
        self._backlogs = Backlogs(self.context)
        validation = HeaderValidation(self._backlogs)
        self._reattachment = Reattachment(self.context, self.table)
        self._dispatcher = Dispatcher(
            self.context,
            self.table,
            validation,
            self._health,
            self._sessions,
            admission,
            reattachment=self._reattachment,
            placer=self.placer,
        )
        self._executions = Executions(self.context, self.table, self._health, self._reattachment)
        self._fleet = MemberCommands(self.context, self._health.worker_failed)
        self._updates = Updates(self.context, self._fleet)
        self._catch_ups = CatchUps(self.context, self._updates, self._fleet)
        self._intents = Intents(self.context, self._fleet)
        self._keys = KeyHandout(self.context)
        self._membership = Membership(
            self.context, self._intents, self._keys, self._on_heartbeat, self._on_lost
        )
        self._publications = Publications(self.context, self._updates)
        self._reservations = Reservations(self.context, self._fleet, self._publications)
        self._desk = ClientCommands(
            self.context,
            self.table,
            self._dispatcher,
            self._fleet,
            self._publications,
            self._sessions,
            intents=self._intents,
        )
        self._offences = Offences(self.context, self._membership, self._client_goodbye)
        self._authority = Authority(self.context, self._offences.expel)
        self._recovered_at: float | None = None
        self._from_client = self._client_handlers()
        self._from_member = self._member_handlers()
        self._runs_from_client: Runs = {"generate": self._dispatcher.submit_run}
        self._runs_from_member: Runs = {"finished": self._executions.ended_run}

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Requests that killed engines, until the shell has kept them."""
        return self._health.dead_letters

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, at `now` in seconds; returns what the shell is to do, in order."""
        match event:
            case Received():  # nothing is captured here: that takes longer than the call
                self._received(event, now)
            case Ticked():
                self._ticked(now)
            case Returned(peer, entries):
                self._returned(peer, entries, now)
            case Malformed(peer):
                if not self._offences.is_shunned(peer, now):
                    self._offences.offended(peer, now)
            case Revoked(peers, code):
                for peer in peers:
                    self.context.count("revoked")
                    self._offences.expel(peer, code, "the rights of this key have changed", now)
            case Counted(counter, n):
                self.context.count(counter, n)
            case LettersKept():
                self._health.dead_letters.clear()
            case KeysChanged(principals):
                self._keys.changed(principals, now)
            case _:
                assert_never(event)
        return self.context.out.take()

    def status(self, now: float) -> FleetStatus:
        """The router's table, for people and tools."""
        return self._desk.status(now)

    def _received(self, event: Received, now: float) -> None:
        peer, entries, principal = event.peer, event.entries, event.principal
        if principal is not None:
            entries = self._authority.screen(peer, principal, entries, now)
        if self._offences.shunned and self._offences.is_shunned(peer, now):
            self.context.count("shunned", len(entries))
            self.context.out.forget(peer)
            return
        sender, handlers, runs = self._sender(peer)
        at, last = 0, len(entries) - 1
        while at <= last:
            entry = entries[at]
            kind = entry.kind
            if at < last and kind in runs and entries[at + 1].kind == kind:  # one is no run
                at = runs[kind](sender, entries, at, now)
                if at > last:
                    break
                entry = entries[at]
                kind = entry.kind
            at += 1
            handle = handlers.get(kind)
            try:
                if handle is not None:
                    handle(sender, entry, now)
                    if kind == "beat" and at <= last:  # it may have been turned away
                        sender, handlers, runs = self._sender(peer)
                else:  # whatever may change who the sender is
                    self._receive_other(event, entry, now)
                    sender, handlers, runs = self._sender(peer)
            except RemoteProtocolError as error:
                self._answer_malformed(peer, entry, str(error))
                if self._offences.offended(peer, now):
                    break
        self._dispatcher.dispatch_waiting(now)

    def _returned(self, peer: Peer, entries: list[Entry], now: float) -> None:
        member = self.context.members.at(peer)
        if member is not None and member.role == "worker":
            self._executions.returned(member, entries)
            self._dispatcher.dispatch_waiting(now)

    def _ticked(self, now: float) -> None:
        context = self.context
        if self._recovered_at is None:
            context.started_at = now
            self._recovered_at = now + context.settings.leases.recovery_s
        for client in self._membership.tick(now):
            self._client_gone(client)
        if context.is_recovering and now >= self._recovered_at:
            context.is_recovering = False
            self._dispatcher.recovered(now)
        self._intents.tick(now)
        n_dropped = context.detached.tick(now)
        if n_dropped:
            context.count("detached_uncollected", n_dropped)
        self._executions.tick(now)
        self._fleet.tick(now)
        self._publications.tick(now)
        self._desk.tick(now)
        self._reservations.tick(now)
        self._updates.tick(now)
        self._catch_ups.tick(now)
        self._isolation.tick(self.table.waiting)
        self._health.tick(now)
        self._sessions.tick(now)
        self._backlogs.tick()
        self._offences.tick(now)
        self._dispatcher.tick(now)

    def _client_handlers(self) -> Handlers:
        return {
            **dict.fromkeys(PASSED_ON, self._desk.ask_members),
            "generate": self._dispatcher.submit,
            "ack": self._client_ack,
            "client_beat": self._membership.client_heartbeat,
            "abort": self._desk.abort,
            "abort_policy": self._desk.abort_policy,
            "status": self._desk.report,
            "open_session": self._sessions.open,
            "close_session": self._sessions.close,
            "list_detached": self._reattachment.list_detached,
            "attach": self._reattachment.attach,
            "publish_version": self._publications.publish,
        }

    def _member_handlers(self) -> Handlers:
        handlers: Handlers = {"beat": self._membership.heartbeat, "accepted": self._accepted}
        handlers["prefixes"] = self._prefixes.told
        handlers.update(dict.fromkeys(ENDINGS, self._ended))
        return handlers

    def _sender(self, peer: Peer) -> tuple[ClientRecord | MemberRecord | None, Handlers, Runs]:
        context = self.context
        member = context.members.at(peer)  # first, because theirs are most of the frames
        if member is not None:
            return member, self._from_member, self._runs_from_member
        client = context.clients.at(peer)
        if client is not None:
            return client, self._from_client, self._runs_from_client
        return None, {}, {}

    def _receive_other(self, event: Received, entry: Entry, now: float) -> None:
        peer = event.peer
        sender, _, _ = self._sender(peer)
        if entry.kind == "hello":
            hello = unpack_as(Hello, entry)
            former = self.context.clients.named(hello.name)
            self._membership.hello(peer, hello, now, event.principal, event.host)
            if former is not None and former.boot != hello.boot:
                self._client_replaced(former)
            if hello.store is not None:
                self.table.waiting.is_untried = True  # what is committed is surely known now
        elif sender is None:
            self.context.count("strangers")
            self._membership.dismiss(peer, "unknown-peer", "say hello first")
        elif entry.kind == "rejected":
            self._membership.rejected(sender, entry)
        elif entry.kind != "goodbye":
            msg = f"unknown message kind {entry.kind[:32]!r}"
            raise RemoteProtocolError(msg)
        elif isinstance(sender, ClientRecord):
            self._client_goodbye(sender)
        else:
            self._membership.goodbye(sender, entry, now)

    def _client_replaced(self, former: ClientRecord) -> None:
        if self.context.clients.named(former.name) is not former:
            self._client_gone(former)

    def _client_gone(self, client: ClientRecord) -> None:
        self._dispatcher.client_gone(client)
        self._reservations.client_gone(client.name)

    def _answer_malformed(self, peer: Peer, entry: Entry, why: str) -> None:
        client = self.context.clients.at(peer)
        if entry.kind == "hello":
            self._membership.dismiss(peer, "bad-hello", why)
        elif client is not None and entry.rid:
            code = "unknown_message" if why.startswith("unknown message") else "bad_request"
            field = _field_in(why)
            self.context.refuse(client.name, entry.rid, refusal(code, why[:300], field))

    def _on_heartbeat(self, worker: MemberRecord, has_changed: bool, now: float) -> None:  # noqa: FBT001 - the signature of OnHeartbeat
        context = self.context
        is_ahead = worker.version > context.committed_of(worker.policy)
        if is_ahead and context.may_miss_commits:
            # Without a store's record, what a worker attests is the best witness of a commit.
            context.note_commit(worker.policy, worker.version)
        if worker.heartbeat.suspects:
            self._health.reported(worker, now)
        self._executions.reconcile(worker)
        if has_changed:
            self._health.judge(worker)

    def _on_lost(self, member: MemberRecord, reason: str, now: float) -> None:
        if member.role == "worker":
            self._health.member_lost(member, reason, now)
            self._executions.member_lost(member, told_reason(reason))
            self._sessions.worker_lost(member)
            self._prefixes.worker_lost(member)
        self._fleet.member_lost(member, now, engine_death(reason))

    def _accepted(self, member: MemberRecord, entry: Entry, _now: float) -> None:
        body = unpack_as(Accepted, entry)
        for rid, _ in body.items:
            if is_share(rid):
                break
        else:
            self._executions.accepted(member, body)
            return
        self._fleet.accepted(Accepted([item for item in body.items if is_share(item[0])]))
        items = [item for item in body.items if not is_share(item[0])]
        if items:
            self._executions.accepted(member, Accepted(items))

    def _ended(self, member: MemberRecord, entry: Entry, now: float) -> None:
        if is_share(entry.rid):
            self._fleet.ended(member, entry, now)
        else:
            self._executions.ended(member, entry, now)

    def _client_ack(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        body = unpack_as(Ack, entry)
        self._dispatcher.acked(client, entry, body)
        if body.over:
            self.table.settle(body.over)

    def _client_goodbye(self, client: ClientRecord) -> None:
        self._client_gone(client)
        self.context.clients.remove(client)
        self.context.out.forget(client.peer)


def _field_in(why: str) -> str:
    """The field a decoder complained about (`… - at `$.sampling.top_p``), dotted."""
    _, found, path = why.rpartition("`$.")
    return path.rstrip("`") if found else ""
