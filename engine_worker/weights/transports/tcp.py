"""`tcp`: chunks are pulled over bulk sockets into a buffer that is used again.

The sources are asked in their order, and the store last. What arrives is verified tensor by
tensor while more arrives, and served to other workers at once.
"""

import asyncio

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.bulk import WINDOW, BulkLink
from rolloutbus.bus.weights.manifest import Bytes, total_bytes
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.wire.errors import BusError, EngineFailed, PeerLost
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate, PullChunk
from rolloutbus.engine_worker.weights.arrival import Arrival, AskedBytes, Giver
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.checks import wrong_bytes
from rolloutbus.engine_worker.weights.relay import Relay
from rolloutbus.engine_worker.weights.staged import Fetcher, Staged, ask_chunk, in_buffer

CHECK_BYTES = 32 * 1024 * 1024
"""Verified in one go: much more than a hop to another thread costs, and soon done."""
STUCK_S = 30.0
"""A source that gave nothing for so long is left, even if it answers that it is busy."""
STORE: Giver = -1


class Pull(Fetcher):
    """Pulls from other workers and from the store."""

    def __init__(self, spare: SpareBuffer, relay: Relay, dialer: Dialer | None = None) -> None:
        self._spare = spare
        self._relay = relay
        self._dialer = dialer

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Pull and verify; see `Fetcher`."""
        content = self._spare.take(total_bytes(manifest.tensors))
        pulling = _Pulling(manifest, content, self._relay)
        self._relay.begin(manifest, content)
        failures: list[str] = []
        try:
            for giver, endpoint in enumerate(ask.sources):
                try:
                    async with BulkLink(endpoint, self._dialer, is_patient=False) as source:
                        await pulling.take_from(source, giver)
                except BusError as error:
                    # Whatever is wrong with it, the next one may have the rest; what it gave and
                    # was found right stays.
                    failures.append(f"{endpoint.partition('#')[0]}: {error}")
            await pulling.take_from(store, STORE)
        except BaseException:
            self._relay.forget(content)
            self._spare.give_back(content)
            raise
        return in_buffer(
            manifest,
            content,
            self._spare,
            transport="tcp",
            moved_bytes=pulling.moved_bytes,
            why="; ".join(failures),
        )

    def close(self) -> None:
        """Give the spare buffer back, which all ways share."""
        self._spare.clear()


class _Pulling:
    """One version on its way into a buffer."""

    def __init__(self, manifest: Manifest, content: Bytes, relay: Relay) -> None:
        self.moved_bytes = 0
        self._manifest = manifest
        self._content = content
        self._relay = relay
        self._arrival = Arrival(manifest.tensors)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._came_at = 0.0

    async def take_from(self, link: BulkLink, giver: Giver) -> None:
        """Pull all that is missing from one source.

        Raises:
            PeerLost: this source is of no use (any more).
            EngineFailed: it has no such version; or the store's bytes are wrong.
            RemoteProtocolError: it answers with something else.
        """
        self._came_at = self._loop.time()
        if self._arrival.is_complete:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._verify(giver))
                for _ in range(WINDOW):
                    tasks.create_task(self._pull(link, giver))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _pull(self, link: BulkLink, giver: Giver) -> None:
        """One chunk after another."""
        while not self._arrival.is_complete:
            piece = self._arrival.take_piece()
            if piece is None:
                await self._change()  # what has come may turn out to be wrong
                continue
            try:
                content = await self._ask(link, piece, giver)
            except BaseException:
                self._arrival.put_back(piece)
                raise
            self._content.data[piece.offset : piece.offset + piece.size_bytes] = content
            self.moved_bytes += piece.size_bytes
            self._came_at = self._loop.time()
            self._arrival.came(piece, giver)
            self._changed.set()

    async def _ask(self, link: BulkLink, piece: AskedBytes, giver: Giver) -> bytes:
        ask = PullChunk(self._manifest.policy, self._manifest.version, *piece)
        while True:
            try:
                return await ask_chunk(link, ask)
            except EngineFailed as error:
                if error.code != "busy" or giver == STORE:
                    raise
                if self._loop.time() - self._came_at > STUCK_S:
                    raise PeerLost("the source does not get on") from error
                await asyncio.sleep(error.retry_after_ms / 1e3)

    async def _verify(self, giver: Giver) -> None:
        """Every tensor that is here as a whole, until all are right."""
        manifest, arrival = self._manifest, self._arrival
        while not arrival.is_complete:
            indices = arrival.to_check(CHECK_BYTES)
            if not indices:
                await self._change()
                continue
            tensors = [manifest.tensors[index] for index in indices]
            wrong = await asyncio.to_thread(first_mismatch, self._content, tensors)
            n_right = len(tensors) if wrong is None else tensors.index(wrong)
            arrival.found_right(n_right)
            self._relay.proven(manifest, self._content, indices[:n_right])
            if wrong is not None:
                self._judge(wrong.name, arrival.found_wrong(), giver)
            self._changed.set()

    def _judge(self, tensor: str, givers: set[Giver], giver: Giver) -> None:
        """A source of wrong bytes is not asked again; wrong bytes of the store end the update."""
        if givers <= {STORE}:
            raise wrong_bytes(tensor)
        if giver != STORE and giver in givers:
            raise PeerLost(f"the source gave wrong bytes of tensor {tensor!r}")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
