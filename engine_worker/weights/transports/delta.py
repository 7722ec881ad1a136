"""`delta`: what changed since the active weights is pulled and applied to a copy of them."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, bytes_of, total_bytes
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.weights.weight_delta import apply, check_parts
from rolloutbus.bus.wire.errors import EngineFailed, RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    PrepareUpdate,
    PullDelta,
    Tensor,
    WeightDelta,
)
from rolloutbus.engine_worker.engine import EngineBusy, TensorRange, WeightSource
from rolloutbus.engine_worker.weights.active import in_batches
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.staged import (
    CannotFetch,
    Fetcher,
    Staged,
    in_buffer,
    pull_chunks,
)

DEAR_SHARE = 0.25
"""Of a version: a larger delta is left alone by a worker that other workers can serve."""
READ_BYTES = 32 * 1024 * 1024
"""Copied from the engine at a time: steps wait for some milliseconds."""


class ChangedSince(Fetcher):
    """Brings the next version by what changed since the active one."""

    def __init__(
        self, engine: WeightSource, spare: SpareBuffer, read_bytes: int = READ_BYTES
    ) -> None:
        """`read_bytes`: read from the engine at once, at most."""
        self._engine = engine
        self._spare = spare
        self._read_bytes = read_bytes

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Pull the delta, apply and verify it; see `Fetcher`.

        Whatever is wrong with a delta, or with the weights that it was applied to, the whole
        version may still be right: it is never the end of the update.
        """
        base, _ = await asyncio.to_thread(self._read, [])
        if not base:
            raise CannotFetch("the weights that the engine started with are no version")
        try:
            delta = await _ask_delta(store, PullDelta(ask.policy, ask.version, base))
            check_parts(delta.parts, delta.size_bytes, manifest.tensors)
            _check_size(delta.size_bytes, ask, manifest)
            changes = np.empty(delta.size_bytes, np.uint8)
            whole = (delta.policy, delta.version, delta.size_bytes)
            await pull_chunks(store, *whole, partial(_put, changes), base=delta.base)
        except (EngineFailed, RemoteProtocolError) as error:
            raise CannotFetch(str(error)) from error
        content = self._spare.take(total_bytes(manifest.tensors))
        try:
            await asyncio.to_thread(self._make, manifest.tensors, delta, changes, content)
        except CannotFetch:
            # Not at a cancellation: then the thread is still at it.
            self._spare.give_back(content)
            raise
        return in_buffer(
            manifest, content, self._spare, transport="delta", moved_bytes=delta.size_bytes
        )

    def _read(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        try:
            return self._engine.read_ranges(ranges)
        except EngineBusy as error:
            raise CannotFetch(str(error)) from error

    def _make(
        self, tensors: Sequence[Tensor], delta: WeightDelta, changes: Bytes, content: Bytes
    ) -> None:
        places = {each.name: bytes_of(content, each) for each in tensors}
        for ranges in in_batches(tensors, self._read_bytes):
            base, pieces = self._read(ranges)
            if base != delta.base:
                raise CannotFetch(f"version {base} became active meanwhile")
            for (name, offset, size_bytes), piece in zip(ranges, pieces, strict=True):
                places[name][offset : offset + size_bytes] = piece
        try:
            apply(content, tensors, delta.parts, changes)
        except RemoteProtocolError as error:
            raise CannotFetch(str(error)) from error
        wrong = first_mismatch(content, tensors)
        if wrong is not None:
            raise CannotFetch(f"tensor {wrong.name!r} did not come out as it was published")


def _check_size(size_bytes: int, ask: PrepareUpdate, manifest: Manifest) -> None:
    """Spare the store's link a delta that is dearer than what other workers have."""
    share = size_bytes / total_bytes(manifest.tensors)
    if ask.sources and share > DEAR_SHARE:
        raise CannotFetch(f"it is {share:.2f} of the version, which other workers pass on")


async def _ask_delta(store: BulkLink, ask: PullDelta) -> WeightDelta:
    delta = await store.ask("pull_delta", ask)
    if not isinstance(delta, WeightDelta) or (delta.version, delta.base) != (ask.version, ask.base):
        raise RemoteProtocolError("pull_delta was answered with something else")
    return delta


def _put(changes: Bytes, offset: int, content: bytes) -> None:
    changes.data[offset : offset + len(content)] = content
