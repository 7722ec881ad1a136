"""Membership of the bus: hellos, heartbeats, leases and goodbyes of members and clients.

Spec: docs/protocol.md, "Membership".
"""

from collections.abc import Callable

from rolloutbus.bus.membership.lease import lease_number
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.transport.endpoints import is_local, split_key
from rolloutbus.bus.wire.codec import SPOKEN, TRACED_VERSION, pack, unpack_as
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.limits import MAX_ROUTER_EPOCH
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Member,
    Members,
    Rejected,
    Welcome,
    served_by,
)
from rolloutbus.bus.wire.validation import check_name
from rolloutbus.router.context import Context, lacking, note_record
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.intents import Intents
from rolloutbus.router.members.key_handout import KeyHandout
from rolloutbus.router.members.records import SERVING, MemberRecord, Reason

OWN_PAUSE_GRACE_S = 2.0
"""Every lease gets at least this much more after the router itself was frozen."""

TELL_EVERY_S = 0.1
"""Clients hear of members at once, but not more often: when a whole fleet changes its state, a
list for each worker's word would be work in the square of their number."""

ENDED_S = 60.0
"""A lease that is over is remembered so long: what was sent under it may still be on its way."""
MAX_ENDED = 10_000

RENEWED = "replaced by a new lease"
"""Why a lease ended whose member, the same process, is here with the next one."""
EXPIRED = "lease expired"
"""Why a lease ended whose member was not heard: it may go on with what is detached."""

LISTENERS = frozenset({"client", "router"})
"""Roles that hold no lease: clients, and a router that stands by and watches this one."""

OnLost = Callable[[MemberRecord, str, float], None]
OnHeartbeat = Callable[[MemberRecord, bool, float], None]
"""(member, whether its state or version changed, now)."""


class Membership:
    """Keeps the tables of members and clients true."""

    def __init__(
        self,
        context: Context,
        intents: Intents,
        keys: KeyHandout,
        on_heartbeat: OnHeartbeat,
        on_lost: OnLost,
    ) -> None:
        self._context = context
        self._intents = intents
        self._keys = keys
        self._on_heartbeat = on_heartbeat
        self._on_lost = on_lost
        self._last_tick_at: float | None = None
        self._told_at = -TELL_EVERY_S
        self._ended: dict[str, tuple[str, float]] = {}
        """Name -> (epoch of its last lease that is over, when it ended), the oldest first."""

    def hello(
        self,
        peer: Peer,
        hello: Hello,
        now: float,
        principal: Principal | None = None,
        host: str = "",
    ) -> None:
        """Somebody introduces themselves on a new connection, or again on the same.

        Args:
            peer: the connection.
            hello: what they say.
            now: seconds.
            principal: whose key the connection has, where there are keys.
            host: address of the other host that they are on, if it is known to be another one.
        """
        problem = check_name(hello.name)
        if not _common_versions(hello):
            mine, theirs = ("{} to {}".format(*each) for each in (SPOKEN, hello.protocol))
            spoken = f"this router speaks protocol {mine}, the peer {theirs}: no version is common"
            self.dismiss(peer, "protocol", spoken)
        elif problem is not None:
            self.dismiss(peer, "bad-hello", problem.message)
        elif (hello.role == "worker") != (hello.worker is not None):
            self.dismiss(peer, "bad-hello", "a worker, and only a worker, brings worker facts")
        elif (hello.role == "store") != (hello.store is not None):
            self.dismiss(peer, "bad-hello", "a store, and only a store, brings store facts")
        elif self._is_renamed(peer, hello):
            self.dismiss(peer, "bad-hello", "this connection belongs to another name")
        elif unreachable := _unreachable(hello, host):
            self.dismiss(peer, "unreachable", unreachable)
        elif problem_of_fleet := self._intents.problem_of(hello):
            self.dismiss(peer, "other-fleet", problem_of_fleet)
        else:
            self._outrank(hello)
            self._intents.greeted(hello)
            if hello.role in LISTENERS:
                self._client_hello(peer, hello, now, principal)
            else:
                self._member_hello(peer, hello, now)

    def heartbeat(self, member: MemberRecord, entry: Entry, now: float) -> None:
        """A member lives: renew its lease, take what it says about itself."""
        context = self._context
        heartbeat = unpack_as(Heartbeat, entry)
        if entry.epoch != member.epoch or heartbeat.seq <= member.heartbeat.seq:
            context.count("stale_heartbeats")
            return
        if member.is_foreign:
            if heartbeat.version:
                self._turn_away(member, now)
                return
            member.fleet, member.is_foreign = "", False
        self._intents.heard(member, heartbeat)
        if member.state == "live":  # its first heartbeat was sent before it could know
            self._keys.heard(member, heartbeat, now)
        has_changed = (
            member.version != heartbeat.version
            or member.heartbeat.state != heartbeat.state
            or member.state != "live"
            or Reason.CUT_OFF in member.blocked_by
        )
        member.note_outbox(heartbeat, before=member.heartbeat.seq)
        context.members.note_load(member)
        member.heartbeat, member.heartbeat_at = heartbeat, now
        if has_changed:
            member.advance("beat")
            self._judge(member)
        context.members.renew(member, now + context.settings.leases.lease_s)
        is_behind = not member.knows_outbox
        lease = Lease(context.router_epoch, context.instance, heartbeat.seq, is_behind)
        context.to_member(member, "lease", pack(lease))
        if member.role == "worker":
            self._on_heartbeat(member, has_changed, now)
            if has_changed:
                self._tell_members(now)

    def _judge(self, member: MemberRecord) -> None:
        """What a heartbeat tells of a worker: its state and weights, and that it can be reached."""
        if member.role != "worker":
            member.version = member.heartbeat.version
            return
        eligibility, is_unready = self._context.eligibility, member.heartbeat.state not in SERVING
        eligibility.note(member, Reason.NOT_READY, is_blocking=is_unready)
        self._context.note_version(member, member.heartbeat.version)
        eligibility.unblock(member, Reason.CUT_OFF)
        eligibility.unblock(member, Reason.JOINING)

    def _turn_away(self, member: MemberRecord, now: float) -> None:
        """Its weights were committed by another fleet: its version number means nothing here."""
        self._context.count("foreign_members")
        why = "its weights are of another fleet"
        self._lose(member, "goodbye", why, now)
        self.dismiss(member.peer, "other-fleet", f"{why}; start it anew")

    def client_heartbeat(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """A client lives."""
        seq = unpack_as(ClientHeartbeat, entry).seq
        if seq > client.heartbeat_seq:
            client.heartbeat_seq, client.seen_at = seq, now
        lease = Lease(self._context.router_epoch, self._context.instance, seq)
        self._context.out.send(client.peer, Entry("lease", body=pack(lease)))

    def goodbye(self, member: MemberRecord, entry: Entry, now: float) -> None:
        """A member leaves in good order."""
        reason = unpack_as(Goodbye, entry).reason
        self._lose(member, "goodbye", reason or "left", now)
        self._context.out.forget(member.peer)

    def expel(self, member: MemberRecord, why: str, now: float) -> None:
        """A member breaks the protocol again and again, or has no rights: its lease ends now."""
        self._lose(member, "goodbye", why, now)

    def rejected(self, sender: ClientRecord | MemberRecord, entry: Entry) -> None:
        """A peer that was welcomed says that it obeys another router, which lives.

        The fleet is where its members are. While some are here, no client can say otherwise.
        """
        body = unpack_as(Rejected, entry)
        if body.instance == self._context.instance:
            return
        self._context.count("rejected")
        if isinstance(sender, ClientRecord) and any(self._context.members):
            return
        self._context.superseded = (
            f"another router holds this fleet: {sender.name} obeys router {body.instance[:8]} "
            f"at epoch {body.router_epoch}; this one was started while that one runs"
        )

    def tick(self, now: float) -> list[ClientRecord]:
        """Judge leases; returns the clients that were silent for too long and are dropped."""
        context = self._context
        late_s = context.settings.leases.late_tick_s
        if self._last_tick_at is not None and now - self._last_tick_at > late_s:
            # We were frozen, not they: judge nobody before they could speak again.
            context.count("own_pauses")
            for member in context.members:
                context.members.renew(member, max(member.expires_at, now + OWN_PAUSE_GRACE_S))
            latest_s = context.settings.client_grace_s - OWN_PAUSE_GRACE_S
            for client in context.clients:
                client.seen_at = max(client.seen_at, now - latest_s)
        self._last_tick_at = now
        for member in context.members.expired(now):
            context.count("expired_leases")
            self._lose(member, "expired", EXPIRED, now)
            context.out.forget(member.peer)
        context.expected.tick(now)
        self._tell_if_due(now)
        self._forget_ended(now - ENDED_S)
        gone = context.clients.silent_since(now - context.settings.client_grace_s)
        for client in gone:
            context.clients.remove(client)
            context.out.forget(client.peer)
        return gone

    def dismiss(self, peer: Peer, code: str, message: str) -> None:
        """Turn a connection away."""
        self._context.out.send(peer, Entry("dismissed", body=pack(Dismissed(code, message))))
        self._context.out.forget(peer)

    def _is_renamed(self, peer: Peer, hello: Hello) -> bool:
        """Whether the connection is known as somebody else: one peer must not fill our tables."""
        client = self._context.clients.at(peer)
        if client is not None:
            return hello.role not in LISTENERS or hello.name != client.name
        member = self._context.members.at(peer)
        return member is not None and (hello.role, hello.name) != (member.role, member.name)

    def _outrank(self, hello: Hello) -> None:
        """Peers obey upwards only: be above every router that this one has obeyed."""
        context = self._context
        if hello.router_instance != context.instance and hello.router_epoch >= context.router_epoch:
            context.router_epoch = min(hello.router_epoch + 1, MAX_ROUTER_EPOCH)
            self._intents.outranked()

    def _client_hello(
        self, peer: Peer, hello: Hello, now: float, principal: Principal | None
    ) -> None:
        known = self._context.clients.named(hello.name)
        replaced = self._context.clients.join(hello.name, hello.boot, peer, now, principal)
        joined = self._context.clients.at(peer)
        if joined is not None:
            joined.is_router = hello.role == "router"
        if replaced is not None and known is not None and known.boot == hello.boot:
            # One process, two connections, and no telling which is newer: if it still uses the
            # other one, it is told to say hello there again.
            self._context.out.forget(replaced)
        elif replaced is not None:
            self.dismiss(replaced, "replaced", "the same client name said hello elsewhere")
        self._welcome(peer, hello, self._public_members(), now)

    def _member_hello(self, peer: Peer, hello: Hello, now: float) -> None:
        context = self._context
        expires_at = now + context.settings.leases.lease_s
        known, joined = context.members.named(hello.name), None
        if known is not None and _has_given_up(hello, lease_number(known.epoch), known.boot):
            # It lay unread in an older connection of this process: the newer lease stands.
            context.count("stale_hellos")
            context.out.forget(peer)
            return
        if known is None and self._is_over(hello):
            context.count("stale_hellos")
            self.dismiss(peer, "unknown-peer", "this lease is over; say hello for another one")
            return
        if known is not None and known.epoch == hello.epoch:
            known.advance("hello")
            context.members.renew(known, expires_at)
            old = context.members.rebind(known, peer)
            if old != peer:
                context.out.forget(old)
        else:
            if known is not None:
                self._replace(known, peer, hello, now)
            joined = MemberRecord(peer, hello, expires_at)
            context.members.add(joined)
            if lacking(context, joined):
                context.eligibility.block(joined, Reason.ADAPTERS)
                context.may_lack[joined.name] = joined
            context.expected.joined(joined.name)
            context.count("joins")
        if hello.store is not None:
            note_record(context, hello.store)
        self._welcome(peer, hello, [], now)
        welcomed = joined or known
        if welcomed is not None:
            self._keys.tell(welcomed, now)
        if joined is not None:
            self._intents.joined(joined, now)
        elif known is not None:
            self._intents.tell(known)
        self._tell_members(now)

    def _forget_ended(self, before: float) -> None:
        while self._ended:
            name, (_, at) = next(iter(self._ended.items()))
            if at > before:
                return
            del self._ended[name]

    def _is_over(self, hello: Hello) -> bool:
        """Whether a hello asks for a lease that has ended here."""
        epoch, _ = self._ended.get(hello.name, ("", 0.0))
        return _has_given_up(hello, lease_number(epoch) + 1, boot=epoch.rpartition(".")[0])

    def _replace(self, known: MemberRecord, peer: Peer, hello: Hello, now: float) -> None:
        reason = RENEWED
        if known.boot != hello.boot:
            reason = "replaced by a newer process"
            self.dismiss(known.peer, "replaced", "a newer process has this name")
        self._lose(known, "goodbye", reason, now)
        if known.peer != peer:
            self._context.out.forget(known.peer)

    def _lose(self, member: MemberRecord, event: str, reason: str, now: float) -> None:
        member.advance(event)
        self._context.eligibility.block(member, Reason.GONE)
        self._intents.lost(member)
        if member.role == "worker":  # first: who hears of the loss asks there for the reason
            self._context.expected.lost(member.name, member.policy, reason, now)
        self._on_lost(member, reason, now)
        self._context.members.remove(member)
        self._ended.pop(member.name, None)  # so that it stays ordered by time
        self._ended[member.name] = (member.epoch, now)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._tell_members(now)

    def _welcome(self, peer: Peer, hello: Hello, members: list[Member], now: float) -> None:
        context = self._context
        started_at = now if context.started_at is None else context.started_at
        up_ms = int((now - started_at) * 1000)
        epoch, instance = context.router_epoch, context.instance
        common = _common_versions(hello)
        takes_traces = context.is_traced and TRACED_VERSION in common
        protocol = TRACED_VERSION if takes_traces else common[0]
        welcome = Welcome(
            *(epoch, instance, protocol, members, self._bulk(), up_ms, context.tap),
            marks=context.wants_marks,
            fleet=context.intent.fleet,
        )
        context.out.send(peer, Entry("welcome", body=pack(welcome)))

    def _tell_members(self, now: float) -> None:
        self._context.has_member_news = True
        self._tell_if_due(now)

    def _tell_if_due(self, now: float) -> None:
        context = self._context
        if not context.has_member_news or now - self._told_at < TELL_EVERY_S:
            return
        context.has_member_news, self._told_at = False, now
        body = pack(
            Members(self._public_members(), self._bulk(), context.wants_marks, context.intent.fleet)
        )
        for client in context.clients:
            context.out.send(client.peer, Entry("members", body=body))

    def _public_members(self) -> list[Member]:
        return [worker.public() for worker in self._context.members.workers()]

    def _bulk(self) -> str:
        store = self._context.members.store()
        return store.hello.store.bulk if store is not None and store.hello.store else ""


def _common_versions(hello: Hello) -> range:
    """Protocol versions that this router and a peer both speak, lowest first."""
    (low, high), (theirs_low, theirs_high) = SPOKEN, hello.protocol
    return range(max(low, theirs_low), min(high, theirs_high) + 1)


def _unreachable(hello: Hello, host: str) -> str:
    """The reason why other hosts cannot reach a member's endpoints; empty: none is known."""
    if not host:
        return ""
    for endpoint in served_by(hello):
        try:
            address, _ = split_key(endpoint)
            is_theirs_alone = is_local(address)
        except SettingsError as error:
            return str(error)[:200]
        if is_theirs_alone:
            return (
                f"{hello.name} is on another host ({host}) than this router, and {address}, where "
                "it serves, can be reached from its own host only: start it with the router's "
                "address on the network and no --stream, --relay or --bulk, or with --advertise"
            )
    return ""


def _has_given_up(hello: Hello, lease_no: int, boot: str) -> bool:
    """Whether a hello asks for a lease before this one of its own process."""
    return hello.boot == boot and lease_number(hello.epoch) < lease_no
