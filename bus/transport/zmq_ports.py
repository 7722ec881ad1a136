"""ZeroMQ ports for commands: links and the middle of their star."""

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import zmq

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.security.zmq_guard import Doorway
from rolloutbus.bus.transport.ports import (
    BatchHandler,
    DownHandler,
    LinkFailure,
    PeerBatchHandler,
    PortCounters,
)
from rolloutbus.bus.transport.zmq_batches import Reader, Receiver, TickOutbox
from rolloutbus.bus.transport.zmq_sockets import (
    ConnectionLimit,
    LinkEvent,
    Monitor,
    address_in,
    allow_v6,
    bind_local,
    limit_frames,
    new_socket,
)
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES

_DOWN = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_REFUSED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_MISPLACED = 500
"""Status of a handshake whose key has another role; see `bus.security.zap`."""


class DealerPort:
    """One end of a link: a fresh socket with a fresh routing id; never reconnects by itself."""

    def __init__(
        self,
        endpoint: str,
        on_batch: BatchHandler,
        on_down: DownHandler | None = None,
        *,
        bind: bool = False,
        dialer: Dialer | None = None,
    ) -> None:
        """Connect, with the keys of `dialer` if it is given; or bind, on this machine only.

        Raises:
            SettingsError: this cannot be an address, or it cannot be had.
        """
        self.counters = PortCounters()
        socket = new_socket(zmq.DEALER)
        # The first byte must not be zero: libzmq keeps those ids for itself.
        socket.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        self._socket = socket
        self.failure: LinkFailure = "no-answer"
        """Why the link did not come to be, once `on_down` was called; read it there. Its owner
        writes it, if the peer itself has said why."""
        self._on_down = on_down
        self._has_keys = dialer is not None
        self._watch = Monitor(socket, _DOWN | _REFUSED, self._happened) if on_down else None
        if bind:
            self.endpoint = bind_local(socket, endpoint)
        else:
            self._connect(endpoint, dialer)
            self.endpoint = endpoint

        def deliver(_: bytes, entries: list[Entry]) -> None:
            on_batch(entries)

        def deliver_dialed(_: bytes, entries: list[Entry]) -> None:
            assert dialer is not None
            dialer.answered(endpoint)
            on_batch(entries)

        receive = deliver if dialer is None else deliver_dialed
        receiver = Receiver(socket, self.counters, receive, has_prefix=False)
        self._reader = Reader(socket, lambda: self._readable(receiver))
        self._outbox = TickOutbox(socket, self.counters, self._reader.after_send)

    def _connect(self, endpoint: str, dialer: Dialer | None) -> None:
        try:
            address = endpoint if dialer is None else dialer.dress(self._socket, endpoint)
            allow_v6(self._socket, address)
            self._socket.connect(address)
        except (SettingsError, zmq.ZMQError) as error:
            if self._watch:
                self._watch.close()
            self._socket.close()
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"{endpoint[:80]!r} is no address to connect to") from error

    def _happened(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.failure = "wrong-role" if event.value == _MISPLACED else "unknown-key"
            elif event.kind & _REFUSED:
                self.failure = "other-key" if self._has_keys else "no-key"
        if self._on_down is not None and any(event.kind & _DOWN for event in events):
            self._on_down()

    def send(self, entry: Entry) -> None:
        """Queue for the end of this tick; waits for the link to come up."""
        self._outbox.put(b"", entry)

    def close(self, *, linger_ms: int = 0) -> None:
        """Drop the link; what is queued has `linger_ms` milliseconds left to get out."""
        self._reader.close()
        if linger_ms:
            self._outbox.flush()
        self._outbox.clear()
        if self._watch:
            self._watch.close()
        self._socket.close(linger_ms)

    def _readable(self, receiver: Receiver) -> bool:
        has_more = receiver.read_some()
        if self._outbox.has_waiting and not self._socket.closed:
            self._outbox.flush()
        return has_more


class RouterPort:
    """The middle of the star: one ROUTER socket per endpoint, one space of routing ids."""

    def __init__(
        self,
        endpoints: Sequence[str],
        on_batch: PeerBatchHandler,
        on_malformed: Callable[[Peer], None] | None = None,
        doorways: Sequence[Doorway] = (),
        *,
        on_undelivered: PeerBatchHandler | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Listen.

        Args:
            endpoints: where.
            on_batch: takes what comes in by endpoints without a lock.
            on_malformed: hears of each message that broke the protocol.
            doorways: the endpoints' locks, in the same order; empty: they have none.
            on_undelivered: takes back what no socket took, for its peer is gone or full.
            max_body_bytes: whoever sends a larger frame is cut off.

        Raises:
            SettingsError: an address is in use or not allowed.
        """
        self.counters = PortCounters()
        self._lanes: list[_RouterLane] = []
        self._outbox_of: dict[bytes, TickOutbox] = {}
        self._key_of: dict[bytes, str] = {}
        """Which key each guarded connection began with."""
        self._address_of: dict[bytes, str] = {}
        """IP address that each guarded connection comes from."""
        peers = _Peers(
            counters=self.counters,
            outbox_of=self._outbox_of,
            key_of=self._key_of,
            address_of=self._address_of,
            max_body_bytes=max_body_bytes,
            on_undelivered=on_undelivered,
        )
        try:
            for endpoint, doorway in zip_longest(endpoints, doorways):
                lane = _RouterLane(endpoint, doorway, peers, on_batch, on_malformed)
                self._lanes.append(lane)
        except SettingsError:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """Its endpoints, with real port numbers."""
        return [lane.endpoint for lane in self._lanes]

    def send(self, peer: Peer, entry: Entry) -> None:
        """Queue for the end of this tick; dropped and counted if the peer is gone or full."""
        outbox = self._outbox_of.get(peer)
        if outbox is None:
            self.counters.dropped_out += 1
        else:
            outbox.put(peer, entry)

    def apply(self, effects: Iterable[SendAll | ForgetPeer]) -> None:
        """Carry out effects of a core, in order."""
        for effect in effects:
            outbox = self._outbox_of.get(effect.peer)
            if isinstance(effect, ForgetPeer):
                self.forget(effect.peer)
            elif outbox is None:
                self.counters.dropped_out += len(effect.entries)
            else:
                outbox.put_all(effect.peer, effect.entries)

    def forget(self, peer: Peer) -> None:
        """The peer will not be sent to any more."""
        self._outbox_of.pop(peer, None)
        self._key_of.pop(peer, None)
        self._address_of.pop(peer, None)

    def address_of(self, peer: Peer) -> str:
        """IP address that a guarded connection comes from; empty if it is not known."""
        return self._address_of.get(peer, "")

    def peers_of(self, keys: Collection[str]) -> list[Peer]:
        """Guarded connections with one of these keys."""
        return [Peer(peer) for peer, key in self._key_of.items() if key in keys]

    def close(self) -> None:
        """Drop all links."""
        for lane in self._lanes:
            lane.close()


class _Peers(NamedTuple):
    """State that the lanes of one star share."""

    counters: PortCounters
    outbox_of: dict[bytes, TickOutbox]
    key_of: dict[bytes, str]
    address_of: dict[bytes, str]
    max_body_bytes: int
    on_undelivered: PeerBatchHandler | None


class _RouterLane:
    """One ROUTER socket."""

    def __init__(
        self,
        endpoint: str,
        doorway: Doorway | None,
        peers: _Peers,
        on_batch: PeerBatchHandler,
        on_malformed: Callable[[Peer], None] | None,
    ) -> None:
        socket = new_socket(zmq.ROUTER) if doorway is None else doorway.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.BACKLOG, 4_096)
        limit_frames(socket, peers.max_body_bytes)
        self.endpoint = (bind_local if doorway is None else doorway.bind)(socket, endpoint)
        self._admission = ConnectionLimit(socket, peers.counters)
        self._socket = socket
        outbox_of = peers.outbox_of

        def deliver(peer: bytes, entries: list[Entry]) -> None:
            if peer not in outbox_of and entries:  # nobody would forget who said nothing
                outbox_of[peer] = outbox
            on_batch(Peer(peer), entries)

        def take_back(peer: bytes, entries: list[Entry]) -> None:
            if peers.on_undelivered is not None:
                peers.on_undelivered(Peer(peer), entries)

        def complain(peer: bytes) -> None:
            if on_malformed is not None:
                on_malformed(Peer(peer))

        if doorway is None:
            receiver = Receiver(
                socket, peers.counters, deliver, has_prefix=True, on_malformed=complain
            )
        else:
            self._doorway, self._peers = doorway, peers
            receiver = Receiver(
                socket,
                peers.counters,
                self._deliver_signed,
                has_prefix=True,
                on_malformed=complain,
                admits=self._admits,
            )
        self._reader = Reader(socket, receiver.read_some)
        self._outbox = outbox = TickOutbox(
            socket, peers.counters, self._reader.after_send, take_back
        )

    def _admits(self, peer: bytes, frame: zmq.Frame) -> bool:
        """Whether its key has rights and began this connection: ids can be stolen."""
        signer = self._doorway.guard.signer(frame)
        began_with = self._peers.key_of.get(peer)
        if signer is None or began_with is None:
            self._doorway.note(frame)
            self._address = address_in(frame)
        if signer is None or began_with not in (None, signer.key):
            return False
        self._signer = signer
        return True

    def _deliver_signed(self, peer: bytes, entries: list[Entry]) -> None:
        if peer not in self._peers.outbox_of and entries:
            self._peers.outbox_of[peer] = self._outbox
            self._peers.key_of[peer] = self._signer.key
            self._peers.address_of[peer] = self._address
        self._doorway.on_signed(Peer(peer), self._signer, entries)

    def close(self) -> None:
        self._admission.close()
        self._reader.close()
        self._outbox.clear()
        self._socket.close()
