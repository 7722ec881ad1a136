"""Serves versions that this host holds, or is receiving, to other workers, over a bulk socket."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.principals import BULK_KINDS_OF, Principal, Principals
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard, guard_of
from rolloutbus.bus.transport.endpoints import advertised
from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_BULK_IN_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Chunk, Manifest, PullChunk, PullManifest
from rolloutbus.engine_worker.weights.buffers import whole
from rolloutbus.engine_worker.weights.relay_core import (
    Asker,
    RelayCore,
    RelayEffect,
    SendChunk,
    VersionKey,
)

TICK_S = 0.25
MAX_HELD = 3
"""Two versions may be staged, and one be in the spare buffer; the oldest of more is let go."""
PEER_SILENCE_S = 60.0
"""A peer that has sent nothing for so long is forgotten; if it lives, it is learnt again."""

T = TypeVar("T")


class Relay:
    """Versions by buffer, on one event loop. Other workers can ask for them after `listen`."""

    def __init__(self) -> None:
        self._core = RelayCore()
        self._content: dict[VersionKey, Bytes] = {}
        self._peers: dict[Peer, float] = {}
        self._port: RouterPort | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guard: SocketGuard | None = None
        self._advertise = ""
        self.sent_bytes = 0
        """Of versions, to other workers."""

    @property
    def bulk(self) -> str:
        """Where others can ask, as they are told it; empty: nowhere."""
        return "" if self._port is None else advertised(self._port.endpoints[0], self._advertise)

    def listen(
        self, endpoint: str, guard: SocketGuard | None = None, *, advertise: str = ""
    ) -> None:
        """Answer at `endpoint`, to workers with keys that `guard` knows if there is one.

        `advertise` is the host that others are told instead of the endpoint's, if it is not empty.

        Raises:
            SettingsError: the address is in use or not allowed.
        """
        doorways = [] if guard is None else [Doorway(guard, "bulk", self._signed)]
        self._guard, self._advertise = guard, advertise
        self._loop = asyncio.get_running_loop()
        self._port = RouterPort(
            [endpoint], self._arrived, doorways=doorways, max_body_bytes=MAX_BULK_IN_BYTES
        )
        self._tick()

    def hand_over(self, principals: Principals) -> None:
        """The router tells who may come in; see `SocketGuard.hand_over`."""
        if self._guard is not None:
            self._guard.hand_over(principals)

    async def while_safe(self, work: Awaitable[T]) -> T:
        """Do the work of the host; SecurityError once the lock on the socket does not work."""
        if self._guard is None:
            return await work
        return await self._guard.while_proven(work)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._port is not None:
            self._port.close()
            self._port = None
        self._content.clear()

    # --- what is here

    def begin(self, manifest: Manifest, content: Bytes) -> None:
        """A version is arriving in `content`, uint8 [its size]."""
        key = (manifest.policy, manifest.version)
        self._content.pop(key, None)
        while len(self._content) >= MAX_HELD:
            self.end(*next(iter(self._content)))
        self._content[key] = content
        self._carry_out(self._core.begin(manifest))

    def proven(self, manifest: Manifest, content: Bytes, tensors: Iterable[int]) -> None:
        """These tensors, by index, are in `content` and have the right digests."""
        key = (manifest.policy, manifest.version)
        if self._content.get(key) is content:  # and not one that arrives a second time
            self._carry_out(self._core.proven(key, tensors))

    def hold(self, manifest: Manifest, content: Bytes) -> None:
        """A version is here as a whole."""
        if (manifest.policy, manifest.version) not in self._content:
            self.begin(manifest, content)
            self.proven(manifest, content, range(len(manifest.tensors)))

    def end(self, policy: str, version: int) -> None:
        """Its bytes are not here (any more), and it is not about to come; idempotent."""
        self._content.pop((policy, version), None)
        self._carry_out(self._core.end((policy, version)))

    def forget(self, buffer: Bytes) -> None:
        """This buffer is about to be overwritten or freed: end the versions in it."""
        for key, content in list(self._content.items()):
            if whole(content) is whole(buffer):
                self.end(*key)

    # --- the socket

    def _arrived(self, peer: Peer, entries: list[Entry]) -> None:
        now = self._loop.time()
        self._peers[peer] = now
        for entry in entries:
            try:
                question = unpack(entry)
            except RemoteProtocolError as error:
                problem = Problem("bad_request", str(error), "not_started")
                self._refuse(peer, entry, problem)
                continue
            if isinstance(question, PullManifest | PullChunk):
                self._carry_out(self._core.ask(Asker(peer, entry.rid), question, now))
            else:
                message = f"a worker does not answer {entry.kind[:32]!r}"
                self._refuse(peer, entry, Problem("unknown_message", message, "not_started"))

    def _signed(self, peer: Peer, signer: Principal, entries: list[Entry]) -> None:
        may_say = BULK_KINDS_OF.get(signer.role, frozenset[str]())
        for entry in entries:
            if entry.kind not in may_say:
                message = f"a {signer.role} may not send {entry.kind[:32]!r}"
                self._refuse(peer, entry, Problem("forbidden", message, "not_started"))
        self._arrived(peer, [entry for entry in entries if entry.kind in may_say])

    def _refuse(self, peer: Peer, entry: Entry, problem: Problem) -> None:
        self._send(peer, Entry("failed", entry.rid, body=pack(problem)))

    def _carry_out(self, effects: Sequence[RelayEffect]) -> None:
        for effect in effects:
            peer, rid = effect.asker
            if isinstance(effect, SendChunk):
                stop = effect.offset + effect.size_bytes
                view = self._content[effect.key].data[effect.offset : stop]
                # Encoded at once, so the view is as good as the bytes, and saves a copy of them.
                chunk = Chunk(effect.offset, cast("bytes", view))
                self._send(peer, Entry("chunk", rid, body=pack(chunk)))
                self.sent_bytes += effect.size_bytes
            else:
                self._send(peer, Entry(effect.kind, rid, body=pack(effect.body)))

    def _send(self, peer: Peer, entry: Entry) -> None:
        if self._port is not None:
            self._port.send(peer, entry)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now = self._loop.time()
        self._carry_out(self._core.tick(now))
        for peer, heard_at in list(self._peers.items()):
            if now - heard_at > PEER_SILENCE_S and self._port is not None:
                del self._peers[peer]
                self._port.forget(peer)


@asynccontextmanager
async def open_relay(
    endpoint: str, security: SecuritySettings | None, *, advertise: str = ""
) -> AsyncGenerator[Relay]:
    """A relay that listens at `endpoint`, if that is not empty, until the end of the block.

    `advertise` as in `Relay.listen`.

    Raises:
        SettingsError: the address is in use or not allowed, or the keys cannot be used.
        SecurityError: the lock on the socket does not work.
    """
    relay = Relay()
    guard = guard_of(security, is_member=True) if endpoint else None
    try:
        if endpoint:
            relay.listen(endpoint, guard, advertise=advertise)
        if guard is not None:
            await guard.prove()
        yield relay
    finally:
        relay.close()
        if guard is not None:
            guard.close()
