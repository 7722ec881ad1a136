"""The client's decisions: what came in and what time it is, to what must be done.

It owns the open requests of one named client and leaves sockets, tasks and futures to its shell.
Spec: docs/protocol.md.
"""

from collections.abc import Iterable, Mapping, Sequence

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    MailboxFull,
    OtherFleet,
    PeerLost,
    RemoteProtocolError,
)
from rolloutbus.bus.wire.messages.endings import Accepted, Lost, Outcome, Queued
from rolloutbus.bus.wire.messages.generation import PolicyAborted, SessionMoved
from rolloutbus.bus.wire.messages.membership import Dismissed, Lease, Member, Members, Welcome
from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.trainer_adapter.client.core.effects import (
    ClientCounters,
    Effect,
    FleetChanged,
    PolicyUnserved,
    Report,
    Stopped,
    Subscribe,
    Unsubscribe,
    Welcomed,
)
from rolloutbus.trainer_adapter.client.core.ending_handler import EndingHandler
from rolloutbus.trainer_adapter.client.core.known_fleet import (
    KnownFleet,
    is_of_one_fleet,
    names_version,
)
from rolloutbus.trainer_adapter.client.core.link import LinkIdentity, RouterLink, Upstream
from rolloutbus.trainer_adapter.client.core.request_book import ClientContext, RequestBook
from rolloutbus.trainer_adapter.client.core.requests import Ask, sealed_ask
from rolloutbus.trainer_adapter.client.core.session_book import HeldSession, SessionBook
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.core.stream_reader import StreamReader

LEAVE_AFTER_S = 10.0
"""A worker's stream is listened to this long after the worker left the list: a restarted router
does not know yet who is there, and they go on publishing meanwhile."""


class ClientCore:
    """Pure: every method takes `now` (seconds) and returns effects, in the order to apply them."""

    def __init__(self, settings: ClientSettings, boot: str, chance: Chance) -> None:
        """`boot` is a random 128-bit hex name of this process's client."""
        self._out: list[Effect] = []
        self.counters = ClientCounters()
        identity = LinkIdentity(settings.name, boot)
        self._link = RouterLink(identity, settings.lease, chance, self._out)
        self._fleet = KnownFleet(self._link, settings.fleet)
        desk = ClientContext(settings, self._link, self._fleet, chance, self.counters, self._out)
        self._sessions = SessionBook(self.counters)
        self._book = RequestBook(desk, boot, self._sessions.ended)
        self._endings = EndingHandler(desk, self._book)
        self._streams = StreamReader(desk, self._book)
        self._endpoints: dict[str, None] = {}
        """Streams listened to."""
        self._leaving: dict[str, float] = {}
        """Endpoints of workers that have left -> when to stop listening there."""
        self.members: tuple[Member, ...] = ()
        """Live workers, as the router last reported."""
        self.bulk = ""
        """Where the weight store serves bytes; empty while none is here."""
        self._error: BusError | None = None
        self.is_shut_out = False
        """This client was dismissed for good, because its key has lost its rights."""
        self._policies: set[str] = set()
        """Policies that some worker has had, or that the caller was warned about."""

    @property
    def n_open(self) -> int:
        """Requests under way, the core's own included."""
        return len(self._book.open)

    @property
    def takes_traces(self) -> bool:
        """Whether entries for the router may bear the trace that they belong to."""
        return self._link.takes_traces

    @property
    def upstream(self) -> Upstream:
        """The router in charge, and the weight store that it reported."""
        return Upstream(self._link.instance, self.bulk)

    @property
    def sessions(self) -> Mapping[str, HeldSession]:
        """The sessions that are open, by name."""
        return self._sessions.held

    @property
    def fleet(self) -> str:
        """Identity of the fleet; empty before it is known."""
        return self._fleet.name

    @property
    def other_fleet(self) -> FleetChanged | None:
        """The fleet that answers, if it differs from the one that the caller knows."""
        return self._fleet.change

    def require_known_fleet(self) -> None:
        """Checks that version numbers belong to the fleet that the caller knows.

        Raises:
            OtherFleet: another fleet answers, and the caller has not accepted it.
        """
        if self.other_fleet is not None:
            raise _told(self.other_fleet, "not_started")

    def require_fleet(self, fleet: str) -> None:
        """Checks that the present fleet has this name; what began there cannot go on elsewhere.

        Raises:
            OtherFleet: another fleet answers, whether or not the caller has accepted it.
        """
        if not self._fleet.is_present(fleet):
            raise _told(FleetChanged(fleet, self.fleet), "not_started")

    def accept_fleet(self) -> None:
        """The caller accepts the change: version numbers belong to this fleet from now on."""
        self._fleet.accept()

    def start(self, now: float) -> list[Effect]:
        """Connect."""
        self._link.start(now)
        return self._drain()

    def submit(self, ask: Ask, deadline_s: float, now: float) -> tuple[str, list[Effect]]:
        """Open a request; its `Complete` comes exactly once. Returns its rid.

        Raises:
            ActorStopped: this client has been closed.
            PeerLost: it has been dismissed.
            MailboxFull: too many requests are open.
            OtherFleet: it names a version, and the fleet is another one than the caller knows.
        """
        if self._link.state == "stopped":
            raise self._error or ActorStopped("the client is closed")
        if self.other_fleet is not None and names_version(sealed_ask(ask)[0]):
            self.require_known_fleet()
        try:
            request = self._book.add(ask, deadline_s, now)
        except MailboxFull as error:
            self._sessions.ended(ask.body, error)
            raise
        if ask.place is not None:
            self._note_policy(ask.place.policy)
        return request.rid, self._drain()

    def abort(self, rids: Iterable[str] | None, now: float) -> tuple[int, list[Effect]]:
        """Stop these generates (None: all) and updates; each still ends by itself. How many."""
        n_aborted = self._book.abort(rids, now)
        return n_aborted, self._drain()

    def unknown(self, rids: Iterable[str]) -> list[str]:
        """Which of these are no requests of this client: neither open, nor ended lately."""
        return self._book.unknown(rids)

    def let_go(self, rid: str, now: float) -> list[Effect]:
        """The caller no longer waits: stops a generate unless it is detached."""
        request = self._book.open.get(rid)
        if request is not None and request.is_generate and not self._book.release(rid):
            self._book.abort([rid], now)
        return self._drain()

    def receive(self, entries: Sequence[Entry], now: float) -> list[Effect]:
        """A batch from the router."""
        self._link.heard(now)
        for entry in entries:
            if self._link.has_rejected:
                self.counters.unexpected_in += 1
                continue
            try:
                self._dispatch(entry, now)
            except RemoteProtocolError:
                self.counters.malformed_in += 1
        return self._drain()

    def receive_stream(self, entries: Sequence[Entry], now: float) -> list[Effect]:
        """A batch that a worker published."""
        for entry in entries:
            try:
                self._streams.receive(entry, now)
            except RemoteProtocolError:
                self.counters.malformed_in += 1
        return self._drain()

    def link_down(self, now: float) -> list[Effect]:
        """The transport says that the connection is gone."""
        self._fail_link(now)
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it every 50 ms."""
        if self._link.tick(now):
            self._link_lost()
        self._book.tick(now)
        if self._leaving:
            self._leave_streams(now)
        return self._drain()

    def close(self, now: float) -> list[Effect]:
        """Leave: the router stops what is open when it hears the goodbye."""
        if self._link.is_up:
            self._book.acks.flush()
        self._link.stop(reason="closed")
        self._book.end_all(ActorStopped("the client was closed", outcome="unknown"), now)
        return self._drain()

    def _dispatch(self, entry: Entry, now: float) -> None:
        if entry.kind in ENDINGS:
            self._endings.ended(entry, now)
            return
        match entry.kind:
            case "accepted":
                for rid, attempt in unpack_as(Accepted, entry).items:
                    self._book.accepted(rid, attempt, entry.route, now)
            case "queued":
                self._book.queued(unpack_as(Queued, entry).rids)
            case "lost":
                self._endings.lost(unpack_as(Lost, entry), now)
            case "lease":
                self._link.answered(unpack_as(Lease, entry))
            case "update_progress":
                self._progressed(entry.rid, unpack_as(UpdateProgress, entry))
            case "policy_aborted":
                self._book.abort_policy(unpack_as(PolicyAborted, entry).policy, now)
            case "session_moved":
                self._sessions.moved(unpack_as(SessionMoved, entry))
            case "welcome":
                self._welcome(unpack_as(Welcome, entry), now)
            case "members":
                self._members_changed(unpack_as(Members, entry), now)
            case "dismissed":
                self._dismissed(unpack_as(Dismissed, entry), now)
            case _:
                self.counters.unexpected_in += 1

    def _progressed(self, rid: str, progress: UpdateProgress) -> None:
        if rid in self._book.open:
            self._out.append(Report(rid, progress))

    def _welcome(self, body: Welcome, now: float) -> None:
        if not self._link.welcomed(body, now):
            if self._link.has_rejected:
                self._link_lost()
            return
        self._link.heard(now)
        self._link.wants_marks = body.marks
        self._update_members(body.members, body.bulk, now)
        if not self._note_fleet(body.fleet, now):
            return
        is_in_doubt = self._fleet.is_in_doubt
        if not (is_in_doubt and self._fleet.is_bound):
            self._out.append(Welcomed(body.router_epoch))
        self._book.acks.say_again(now)
        self._book.relinked(now, () if is_in_doubt else self._sessions.reopening())

    def _members_changed(self, body: Members, now: float) -> None:
        """Updates the fleet after news of members; the router may know its fleet by now."""
        if not self._link.is_up:  # its welcome was lost: nothing says yet which router this is
            self.counters.unexpected_in += 1
            return
        self._link.wants_marks = body.marks
        self._update_members(body.members, body.bulk, now)
        was_in_doubt = self._fleet.is_in_doubt
        if not self._note_fleet(body.fleet, now) or not was_in_doubt or self._fleet.is_in_doubt:
            return
        if self._fleet.is_bound:
            self._out.append(Welcomed(self._link.router_epoch))
        self._book.send_held(now, self._sessions.reopening())

    def _note_fleet(self, fleet: str, now: float) -> bool:
        """Takes the fleet's name (empty: unknown yet); returns False if it is the wrong fleet."""
        change = self._fleet.named(fleet)
        if change is None:
            return True
        if self._fleet.is_bound:
            message = f"fleet {fleet} answers at the router's address, not {change.former}"
            self._error = OtherFleet(message)
            self._link.stop(reason="another fleet was expected")
            self._book.end_all(self._error, now)
            self._out.append(Stopped(self._error))
            return False
        self.counters.fleets_changed += 1
        error = _told(change, "unknown")
        for request in list(self._book.open.values()):
            if is_of_one_fleet(request):
                self._book.end(request, error, now)
        self._out.append(change)
        return True

    @property
    def is_at_standby(self) -> bool:
        """Whether the connection leads to a router that stands by for another one."""
        return self._link.is_at_standby

    def _dismissed(self, body: Dismissed, now: float) -> None:
        match body.code:
            case "unknown-peer":
                self._link.greet_again(now)
            case "shutting-down":
                self._fail_link(now)
            case "standby":
                self._link.stood_by(now)
                self._link_lost()
            case _:
                self.is_shut_out = body.code == "forbidden"
                self._error = PeerLost(f"the router dismissed this client: {body.message}")
                self._link.stop()
                self._book.end_all(self._error, now)
                self._out.append(Stopped(self._error))

    def _fail_link(self, now: float) -> None:
        self._link.failed(now)
        self._link_lost()

    def _link_lost(self) -> None:
        self._book.acks.drop()
        self.counters.reconnects += 1

    def _note_policy(self, policy: str) -> None:
        """Warns of a policy without workers: it may be misspelt, or a worker may still join."""
        served = sorted({member.policy for member in self.members if member.stream})
        if served and policy not in self._policies:
            self._policies.add(policy)
            self._out.append(PolicyUnserved(policy, served))

    def _update_members(self, members: Sequence[Member], bulk: str, now: float) -> None:
        self.members = tuple(members)
        self.bulk = bulk
        self._policies.update(member.policy for member in members)
        present = {member.stream for member in members if member.stream}
        for endpoint in self._endpoints:
            if endpoint not in present:
                self._leaving.setdefault(endpoint, now + LEAVE_AFTER_S)
        for endpoint in sorted(present):
            if endpoint not in self._endpoints:
                self._out.append(Subscribe(endpoint))
            self._endpoints[endpoint] = None
            self._leaving.pop(endpoint, None)

    def _leave_streams(self, now: float) -> None:
        for endpoint in [each for each, leave_at in self._leaving.items() if leave_at <= now]:
            del self._endpoints[endpoint], self._leaving[endpoint]
            self._out.append(Unsubscribe(endpoint))

    def _drain(self) -> list[Effect]:
        effects = self._out.copy()
        self._out.clear()
        return effects


def _told(change: FleetChanged, outcome: Outcome) -> OtherFleet:
    return OtherFleet(
        f"fleet {change.fleet} answers at the router's address; before it was {change.former}, "
        "whose version numbers mean nothing here: publish your weights, then `accept_fleet()`, or "
        "connect to the fleet that you mean",
        outcome=outcome,
    )
