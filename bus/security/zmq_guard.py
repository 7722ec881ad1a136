"""The guard of the sockets that an actor binds: key, allow-list, ZAP handler, subscription gate."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import zmq
import zmq.utils.monitor

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.security.key_files import AllowList, read_key_pair
from rolloutbus.bus.security.keys import KeyPair, SecuritySettings
from rolloutbus.bus.security.principals import (
    Door,
    Principal,
    Principals,
    answer,
    granted,
    is_claim,
    knocker,
    user_in,
)
from rolloutbus.bus.security.zmq_curve import dress_client, dress_server, new_key_pair
from rolloutbus.bus.transport.endpoints import split_key, with_key
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_batches import Reader
from rolloutbus.bus.transport.zmq_sockets import (
    Wire,
    allow_v6,
    bind_anywhere,
    hang_up,
    new_context,
    new_socket,
    wire_of,
)
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import SecurityError, SettingsError

# The proof of a lock only shakes hands: the actor behind the socket notices nothing.
HANDSHAKE_S = 20.0
"""A busy machine needs a fraction of it."""
TRIES = 3
"""A publisher that is just being opened again, or a process that was frozen, is not broken."""
PAUSE_S = 0.5

_ACCEPTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


async def prove(address: str, kind: int, server_key: str, known: KeyPair) -> None:
    """Knock twice at a guarded socket.

    Args:
        address: where it listens.
        kind: of the socket that knocks: DEALER at a ROUTER, SUB at a PUB.
        server_key: what it must prove to hold.
        known: a pair that must be let in.

    Raises:
        SecurityError: a random key came in, or the known one did not.
    """
    if await _is_let_in(address, kind, server_key, new_key_pair("stranger")):
        raise SecurityError(f"{address} let an unknown key in: it must not be used")
    for _ in range(TRIES):
        if await _is_let_in(address, kind, server_key, known):
            return
        await asyncio.sleep(PAUSE_S)
    raise SecurityError(f"{address} lets nobody in: the check of keys does not answer")


async def _is_let_in(address: str, kind: int, server_key: str, pair: KeyPair) -> bool:
    socket = new_socket(kind)
    dress_client(socket, pair, server_key)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = socket.get_monitor_socket(_ACCEPTED | _REFUSED)
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def read_some() -> bool:
        try:
            event = zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if not found.done():
            found.set_result(int(event["event"]) == _ACCEPTED)
        return True

    reader = Reader(monitor, read_some)
    try:
        allow_v6(socket, address)
        socket.connect(address)
        async with asyncio.timeout(HANDSHAKE_S):
            return await found
    except TimeoutError:
        return False
    finally:
        reader.close()
        socket.disable_monitor()
        monitor.close()
        socket.close()


ZAP_ENDPOINT = "inproc://zeromq.zap.01"
QUESTIONS_AT_ONCE = 64


class ZapHandler:
    """Answers every question of one context; once it is closed, no peer comes in."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        answer: Callable[[Sequence[bytes]], list[bytes]],
    ) -> None:
        self._answer = answer
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._reader = Reader(self._socket, self._read_some)

    def close(self) -> None:
        """Answer no more."""
        self._reader.close()
        self._socket.close()

    def _read_some(self) -> bool:
        for _ in range(QUESTIONS_AT_ONCE):
            try:
                asker, *question = self._socket.recv_multipart(zmq.NOBLOCK)
                self._socket.send_multipart([asker, *self._answer(question)], zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError:  # the asker is gone: whoever connects asks again
                continue
        return True


REFRESH_S = 0.5
"""Between two looks at the allow-list."""
PROVE_S = 60.0
"""Between two proofs that the locks work."""
LAST_WORDS_S = 5.0
"""From the end of a key's rights to the end of its connections to a router, which tells them."""

WARN_S = 10.0
"""Between two complaints about one key that is turned away again and again."""
MAX_WARNED = 100
"""Keys that are remembered for it."""

T = TypeVar("T")

SignedBatchHandler = Callable[[Peer, Principal, list[Entry]], None]
"""(connection, whose key it began with, entries)."""


def _nobody_cares(_: frozenset[str]) -> None:
    """Default: does nothing more; entries of a revoked peer are dropped in any case."""


def _nobody_asks(_: Principals) -> None:
    """Default: does nothing with an allow-list."""


class SocketGuard:
    """One actor's locks. Its sockets have a context, and so a ZAP handler, of their own."""

    def __init__(
        self,
        settings: SecuritySettings,
        on_revoked: Callable[[frozenset[str]], None] = _nobody_cares,
    ) -> None:
        """Read the keys and the allow-list.

        Without a file of a list it refuses everybody until the router hands one over.

        Args:
            settings: where they are.
            on_revoked: hears of keys whose rights have changed.

        Raises:
            SettingsError: key file or allow-list cannot be used.
        """
        self._pair = read_key_pair(settings.key_file)
        self._file = AllowList(settings.allow_list) if settings.allow_list else None
        self._principals: Principals = self._file.principals if self._file is not None else {}
        self._twins: Principals = {}
        """Our own key, if another process has it, too; it stands in no list."""
        self.on_revoked = on_revoked
        self.on_changed: Callable[[Principals], None] = _nobody_asks
        """Called with the allow-list when it has changed."""
        # Nobody's: it passes every door, and nothing that it might say passes `signer`.
        self._probe = new_key_pair("probe")
        self._also = frozenset({self._probe.public})
        self._listening: dict[str, int] = {}
        """Address -> the kind of socket that can knock there."""
        self._wires: dict[int, tuple[Wire, Door, str]] = {}
        """Descriptor -> the connection that it was when it was noted, to where, and its key."""
        self._ending: set[Wire] = set()
        self.n_refused = 0
        """Connections that were turned away."""
        self._warn_at: dict[tuple[str, str], float] = {}
        """(door, key that was turned away there) -> when to complain of it again."""
        self._is_proving = False
        self._context = new_context()
        self.zap = ZapHandler(self._context, self._answer)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(REFRESH_S, self._refresh)

    @property
    def public(self) -> str:
        """The key that peers must expect at this actor's sockets."""
        return self._pair.public

    def socket(self, kind: int, door: Door) -> zmq.Socket[bytes]:
        """A locked socket, for `bind`."""
        socket = new_socket(kind, self._context)
        dress_server(socket, self._pair, door)
        return socket

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Bind a socket; returns the address, our public key included, that peers connect to.

        Raises:
            SettingsError: the address is in use or cannot be had; the socket is closed.
        """
        address = bind_anywhere(socket, split_key(endpoint)[0])
        self._listening[address] = zmq.SUB if socket.type == zmq.XPUB else zmq.DEALER
        return with_key(address, self.public)

    def principal(self, key: str) -> Principal | None:
        """Principal of this key, by the present allow-list."""
        return self._principals.get(key) or self._twins.get(key)

    @property
    def principals(self) -> Principals:
        """Public key -> whose it is, by the present allow-list."""
        return self._principals

    def hand_over(self, principals: Principals) -> None:
        """The router tells who may come in; a file of our own goes before."""
        if self._file is None:
            self._apply(principals)

    def admit_twin(self, name: str) -> None:
        """Let in whoever has this actor's own key, to watch: another router of the same fleet."""
        self._twins = {self.public: Principal(self.public, name, "subscriber")}

    def signer(self, frame: zmq.Frame) -> Principal | None:
        """Returns the principal who sent this frame; None if it has no rights now."""
        try:
            key = frame.get("User-Id")
        except zmq.ZMQError:
            return None
        return self.principal(str(key))

    def note(self, frame: zmq.Frame, door: Door) -> Wire | None:
        """Remember the connection of this frame, to end it with the rights of its key.

        Without rights it is ended in any case.
        """
        wire = wire_of(frame)
        if wire is not None:
            key = str(frame.get("User-Id"))
            self._wires[wire.fd] = (wire, door, key)
            if self.principal(key) is None:
                self._end(wire, door, key)
        return wire

    async def prove(self) -> None:
        """Test the locks of all bound sockets.

        Raises:
            SecurityError: one does not keep strangers out, or keeps everybody out.
        """
        self._is_proving = True  # the stranger that is turned away is our own
        try:
            for address, kind in list(self._listening.items()):
                await prove(address, kind, self.public, self._probe)
        finally:
            self._is_proving = False

    async def while_proven(self, work: Awaitable[T], every_s: float = PROVE_S) -> T:
        """Do the work of an actor, and prove the locks every `every_s` seconds meanwhile.

        Raises:
            SecurityError: they do not work any more.
        """
        working = asyncio.ensure_future(work)
        proving = asyncio.ensure_future(self._keep_proving(every_s))
        try:
            await asyncio.wait((working, proving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                proving.result()
            return await working
        finally:
            for task in (working, proving):
                task.cancel()
            await asyncio.wait((working, proving))  # the actor tidies up

    def close(self) -> None:
        """Refuse every peer from now on; the actor's sockets must be closed before."""
        self._timer.cancel()
        self.zap.close()
        self._context.destroy(linger=0)

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        reply = answer(question, {**self._twins, **self._principals}, self._also)
        if not user_in(reply) and knocker(question) is not None:
            self.refresh()  # it may have been let in, or invited, a moment ago
            reply = answer(question, {**self._twins, **self._principals}, self._also)
        if not user_in(reply):
            self.n_refused += 1
            self._complain(question)
        return reply

    def _complain(self, question: Sequence[bytes]) -> None:
        """Warn of a key that was turned away, with the reason: at once, and every WARN_S."""
        knocked, now = knocker(question), self._loop.time()
        if knocked is None or self._is_proving:
            return
        door, key = knocked
        if now < self._warn_at.get(knocked, 0.0):
            return
        self._warn_at.pop(knocked, None)
        if len(self._warn_at) >= MAX_WARNED:
            del self._warn_at[next(iter(self._warn_at))]
        self._warn_at[knocked] = now + WARN_S
        principal = self.principal(key)
        if principal is None:
            warn(f"a key that is not in the allow-list was turned away at the {door}: {key}")
        else:
            warn(f"the {principal.role}'s key of {principal.name!r} has no place at the {door}")

    def refresh(self) -> None:
        """Look at the allow-list's file now; it is looked at every REFRESH_S in any case."""
        file = self._file
        if file is None:
            return
        complained = file.problem
        if file.refresh():
            self._apply(file.principals)
        elif file.problem not in ("", complained):
            sys.stderr.write(f"warning: {file.problem}: the list before still holds\n")

    def _refresh(self) -> None:
        self._timer = self._loop.call_later(REFRESH_S, self._refresh)
        self.refresh()

    def _apply(self, now: Principals) -> None:
        before, self._principals = self._principals, now
        lost = frozenset(key for key, was in before.items() if now.get(key) != was)
        if lost:
            self.on_revoked(lost)
            for wire, door, key in list(self._wires.values()):
                if key in lost:
                    self._end(wire, door, key)
        if now != before:
            self.on_changed(now)

    def _end(self, wire: Wire, door: Door, key: str) -> None:
        """End a connection, now or after the last words, unless the key has new rights by then.

        A subscription is judged once, so who has other rights must subscribe again.
        """
        if door in ("stream", "tap"):
            hang_up(wire)
        elif wire not in self._ending:
            self._ending.add(wire)
            self._loop.call_later(LAST_WORDS_S, self._end_unless_allowed, wire, key)

    def _end_unless_allowed(self, wire: Wire, key: str) -> None:
        self._ending.discard(wire)
        if self.principal(key) is None:
            hang_up(wire)

    async def _keep_proving(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.prove()


def guard_of(
    security: SecuritySettings | None,
    on_revoked: Callable[[frozenset[str]], None] = _nobody_cares,
    *,
    is_member: bool = False,
) -> SocketGuard | None:
    """The guard that these settings ask for; None without keys.

    `is_member`: the router hands it an allow-list, if it has none of its own.

    Raises:
        SettingsError: key file or allow-list are missing or cannot be used.
    """
    if security is None or not security.key_file:
        return None
    if not security.allow_list and not is_member:
        raise SettingsError("security: who listens needs an allow_list beside its key_file")
    return SocketGuard(security, on_revoked)


def _unheard(_: Peer, __: Principal, ___: list[Entry]) -> None:
    """Default: subscribers send no entries to a publisher."""


class Doorway(NamedTuple):
    """One guarded socket: its guard, its kind, and the handler of its entries."""

    guard: SocketGuard
    door: Door
    on_signed: SignedBatchHandler = _unheard

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """See `SocketGuard.socket`."""
        return self.guard.socket(kind, self.door)

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """See `SocketGuard.bind`."""
        return self.guard.bind(socket, endpoint)

    def note(self, frame: zmq.Frame) -> Wire | None:
        """See `SocketGuard.note`."""
        return self.guard.note(frame, self.door)


MAX_ASKED = 1_000
"""Subscriptions of one connection. One that asks on and on would fill the publisher's memory."""
READ_AT_ONCE = 64

_SUBSCRIBE, _CANCEL = b"\1", b"\0"


class SubscriptionGate:
    """Grants subscriptions at one XPUB socket, or not, by the key that asks.

    libzmq hands them over one by one (ZMQ_XPUB_MANUAL), and a grant goes to the connection whose
    subscription was read last. It counts wrong when a subscriber sends a message, which no honest
    one does: from then on, until all is read, a grant would go to somebody else's connection.
    """

    def __init__(self, socket: zmq.Socket[bytes], doorway: Doorway, counters: PortCounters) -> None:
        """Before the socket is bound."""
        socket.setsockopt(zmq.XPUB_MANUAL, 1)
        self._socket = socket
        self._doorway = doorway
        self._counters = counters
        self._is_miscounted = False
        self._n_asked: dict[int, tuple[Wire, int]] = {}
        """Descriptor -> which connection that is, and how often it asked."""

    def read_some(self) -> bool:
        """Judge some of what waits; True if there may be more."""
        for _ in range(READ_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._is_miscounted = False
                return False
            self._judge(frame)
        return True

    def _judge(self, frame: zmq.Frame) -> None:
        asked = frame.bytes
        if frame.more or asked[:1] not in (_SUBSCRIBE, _CANCEL):
            self._is_miscounted = True
        if self._is_miscounted:
            # The guilty one must go, and whoever came meanwhile will come again.
            self._counters.malformed_in += 1
            self._turn_out(wire_of(frame))
            return
        principal = self._doorway.guard.signer(frame)
        wire = self._doorway.note(frame)
        if principal is None or wire is None:  # also how libzmq tells that a connection has ended
            return
        if self._counted(wire) > MAX_ASKED:
            self._turn_out(wire)
            return
        topic = granted(principal, asked[1:])
        if topic is None:
            self._counters.foreign_in += is_claim(asked[1:])
        elif asked[:1] == _SUBSCRIBE:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        else:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def _counted(self, wire: Wire) -> int:
        known, n_before = self._n_asked.get(wire.fd, (wire, 0))
        n = n_before + 1 if known == wire else 1
        self._n_asked[wire.fd] = (wire, n)
        return n

    def _turn_out(self, wire: Wire | None) -> None:
        if wire is not None:
            hang_up(wire)
