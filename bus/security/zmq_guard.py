"""What stands before the sockets that an actor binds: its key, its allow-list, its ZAP handler."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import zmq

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.security.allow_list import AllowList
from rolloutbus.bus.security.key_files import read_key_pair
from rolloutbus.bus.security.principals import Door, Principal
from rolloutbus.bus.security.settings import SecuritySettings
from rolloutbus.bus.security.zap import answer, knocker, user_in
from rolloutbus.bus.security.zmq_curve import dress_server, new_key_pair
from rolloutbus.bus.security.zmq_proof import prove
from rolloutbus.bus.security.zmq_zap import ZapHandler
from rolloutbus.bus.transport.endpoints import split_key, with_key
from rolloutbus.bus.transport.zmq_contexts import new_context
from rolloutbus.bus.transport.zmq_sockets import bind_anywhere, new_socket
from rolloutbus.bus.transport.zmq_wires import Wire, hang_up, wire_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.ids import Peer

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
    """What a revoked peer sends is dropped in any case."""


class Guard:
    """One actor's locks. Its sockets have a context, and so a ZAP handler, of their own."""

    def __init__(
        self,
        settings: SecuritySettings,
        on_revoked: Callable[[frozenset[str]], None] = _nobody_cares,
    ) -> None:
        """Read keys and allow-list.

        Args:
            settings: where they are.
            on_revoked: hears of keys whose rights have changed.

        Raises:
            SettingsError: key file or allow-list cannot be used.
        """
        self._pair = read_key_pair(settings.key_file)
        self._allowed = AllowList(settings.allow_list)
        self.on_revoked = on_revoked
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
        """Bind a socket of ours; returns its address with our key, as peers must know it.

        Raises:
            SettingsError: the address is in use or cannot be had; the socket is closed.
        """
        address = bind_anywhere(socket, split_key(endpoint)[0])
        self._listening[address] = zmq.SUB if socket.type == zmq.XPUB else zmq.DEALER
        return with_key(address, self.public)

    def principal(self, key: str) -> Principal | None:
        """Whose key this is, as of now."""
        return self._allowed.principals.get(key)

    def signer(self, frame: zmq.Frame) -> Principal | None:
        """Who sent this frame, whatever it claims; None if they have no rights (any more)."""
        try:
            key = frame.get("User-Id")
        except zmq.ZMQError:
            return None
        return self._allowed.principals.get(str(key))

    def note(self, frame: zmq.Frame, door: Door) -> Wire | None:
        """Remember what this frame came over, to be ended with the rights of its key.

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
        """Let nobody in any more; the actor's sockets must be closed before."""
        self._timer.cancel()
        self.zap.close()
        self._context.destroy(linger=0)

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        reply = answer(question, self._allowed.principals, self._also)
        if not user_in(reply):
            self.n_refused += 1
            self._complain(question)
        return reply

    def _complain(self, question: Sequence[bytes]) -> None:
        """Say who was turned away, and why: at once, and every WARN_S."""
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

    def _refresh(self) -> None:
        self._timer = self._loop.call_later(REFRESH_S, self._refresh)
        before, complained = self._allowed.principals, self._allowed.problem
        if self._allowed.refresh():
            now = self._allowed.principals
            lost = frozenset(key for key, was in before.items() if now.get(key) != was)
            if lost:
                self.on_revoked(lost)
                for wire, door, key in list(self._wires.values()):
                    if key in lost:
                        self._end(wire, door, key)
        elif self._allowed.problem not in ("", complained):
            sys.stderr.write(f"warning: {self._allowed.problem}: the list before still holds\n")

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
) -> Guard | None:
    """The guard that these settings ask for; None without keys.

    Raises:
        SettingsError: key file or allow-list are missing or cannot be used.
    """
    if security is None or not security.key_file:
        return None
    if not security.allow_list:
        raise SettingsError("security: who listens needs an allow_list beside its key_file")
    return Guard(security, on_revoked)


def _unheard(_: Peer, __: Principal, ___: list[Entry]) -> None:
    """Nothing is said through a publisher's door."""


class Doorway(NamedTuple):
    """One guarded socket: its guard, what kind it is, and who hears what comes in."""

    guard: Guard
    door: Door
    on_signed: SignedBatchHandler = _unheard

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """See `Guard.socket`."""
        return self.guard.socket(kind, self.door)

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """See `Guard.bind`."""
        return self.guard.bind(socket, endpoint)

    def note(self, frame: zmq.Frame) -> Wire | None:
        """See `Guard.note`."""
        return self.guard.note(frame, self.door)
