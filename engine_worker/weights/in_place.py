"""Mode `overwrite`: a version is written over the active weights, of which no copy is left.

Everything that can be judged beforehand is judged in prepare. From the first byte that is written
until all digests are right the engine is torn; if that breaks, the next whole version mends it.
Spec: docs/protocol.md, "Weights", 7.
"""

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import bytes_of, total_bytes
from rolloutbus.bus.weights.shm import PinnedSegment, SegmentGone, SegmentReader, host_id
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    Committed,
    CommitUpdate,
    Manifest,
    Prepared,
    PrepareUpdate,
    Tensor,
)
from rolloutbus.engine_worker.engine import InPlaceSink
from rolloutbus.engine_worker.weights.active import pieces
from rolloutbus.engine_worker.weights.arrival import Layout
from rolloutbus.engine_worker.weights.checks import n_not_finite, wrong_bytes
from rolloutbus.engine_worker.weights.staged import ask_manifest, pull_chunks

Result = TypeVar("Result")

PIECE_BYTES = 8 * 1024 * 1024
"""Read back at once, to be verified."""


class _Agreed(NamedTuple):
    ask: PrepareUpdate
    manifest: Manifest
    transport: str


class InPlace:
    """Overwrites one engine's weights; all methods on one event loop."""

    def __init__(
        self, engine: InPlaceSink, dialer: Dialer | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """`dialer`: the keys to connect with, if any; `chunk_bytes`: pulled at once."""
        self._engine = engine
        self._dialer = dialer
        self._chunk_bytes = chunk_bytes
        self._reader = SegmentReader()
        self._agreed: dict[int, _Agreed] = {}

    def agree(self, ask: PrepareUpdate, manifest: Manifest) -> Prepared:
        """The manifest fits the engine; nothing is taken or written before `commit`."""
        is_near = ask.transport == "shm" and manifest.host == host_id()
        transport, size_bytes = "shm" if is_near else "tcp", total_bytes(manifest.tensors)
        self._agreed.clear()  # preparing another version gives this one up
        self._agreed[ask.version] = _Agreed(ask, manifest, transport)
        why = "" if transport == ask.transport else f"in place it comes by {transport}"
        # What a commit will move is reported now: its own result has no field for it.
        moved_bytes = 0 if is_near else size_bytes
        return Prepared(ask.version, size_bytes, transport, 0.0, moved_bytes, why)

    def has(self, version: int) -> bool:
        """Whether `commit` knows this version."""
        return version in self._agreed

    def drop(self, version: int) -> None:
        """Forget a version that is not wanted any more. Idempotent."""
        self._agreed.pop(version, None)

    async def commit(self, body: CommitUpdate, timeout_s: float) -> Committed:
        """Overwrite all weights, verify what was written, and let the engine go on.

        Raises:
            EngineBusy: the engine cannot stop for it; its weights are whole.
            EngineFailed, PeerLost, RemoteProtocolError: before anything was written; or, if the
                engine's stats say that it is torn, in between.
        """
        ask, manifest, transport = self._agreed[body.version]
        # Not patient: the store may come back elsewhere, and the router knows where.
        async with BulkLink(ask.bulk, self._dialer, is_patient=False) as store:
            # Without bytes to write, weights that are whole must not be torn.
            manifest = await _in_time(ask_manifest(store, ask), timeout_s)
            pin = self._pin(manifest) if transport == "shm" else None
            # Without a limit: it may wait for requests to end, and cannot be called off.
            await asyncio.to_thread(self._engine.begin_overwrite, body.in_flight)
            if pin is not None:
                await self._copy(manifest, pin)
            else:
                await _in_time(self._pull(store, ask, manifest), timeout_s)
        await asyncio.to_thread(self._verify, manifest)
        swap = await asyncio.to_thread(self._engine.end_overwrite, body.version)
        self.drop(body.version)
        return Committed(swap.version, swap.stall_ms, swap.n_retracted, swap.n_aborted)

    def _pin(self, manifest: Manifest) -> PinnedSegment | None:
        """The store's segment; None if its bytes have to be pulled after all."""
        try:
            return self._reader.pin(manifest.segment, total_bytes(manifest.tensors))
        except SegmentGone:
            return None

    async def _copy(self, manifest: Manifest, pin: PinnedSegment) -> None:
        def copy() -> None:
            for tensor in manifest.tensors:
                self._engine.overwrite(tensor.name, 0, bytes_of(pin.content, tensor))

        try:
            await asyncio.to_thread(copy)
        finally:
            pin.release()

    async def _pull(self, store: BulkLink, ask: PrepareUpdate, manifest: Manifest) -> None:
        tensors, layout = manifest.tensors, Layout(manifest.tensors)

        def put(offset: int, content: bytes) -> None:
            raw = np.frombuffer(content, np.uint8)
            for index, n_bytes in layout.touched(offset, len(raw)):
                tensor = tensors[index]
                start = max(tensor.offset, offset)
                part = raw[start - offset :][:n_bytes]
                # Here and not in a thread, which could outlast this update and spoil the next.
                self._engine.overwrite(tensor.name, start - tensor.offset, part)

        whole = (ask.policy, ask.version, total_bytes(tensors))
        await pull_chunks(store, *whole, put, chunk_bytes=self._chunk_bytes)

    def _verify(self, manifest: Manifest) -> None:
        for tensor in manifest.tensors:
            hasher = xxhash.xxh3_64()
            for each in pieces([tensor], PIECE_BYTES):
                piece = self._engine.overwritten(*each)
                if n_not_finite(piece, tensor.dtype):
                    raise EngineFailed(_not_finite(tensor))
                hasher.update(piece.data)
            if hasher.intdigest() != tensor.digest:
                raise wrong_bytes(tensor.name)


async def _in_time(call: Awaitable[Result], timeout_s: float) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        message = f"the version's bytes were not here after {timeout_s:g} s"
        raise EngineFailed(Problem("deadline", message, "failed")) from error


def _not_finite(tensor: Tensor) -> Problem:
    message = f"tensor {tensor.name!r} holds infinity or NaN"
    return Problem("bad_request", message, "failed", field=f"tensors.{tensor.name}")
