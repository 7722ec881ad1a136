"""The worker's side of a weight version: checked against the engine, pulled, verified, staged.

On the store's host the version is read in place: its segment stays pinned until `drop`, and the
engine copies straight from it. Elsewhere chunks are pulled into buffers that are used again.
Spec: docs/protocol.md, "Weights".
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bus.bulk import BulkLink
from bus.errors import EngineFailed, Refused, RemoteProtocolError
from bus.host import host_id
from bus.manifest import Bytes, bytes_of, check_tensors, first_mismatch, total_bytes
from bus.messages.endings import Problem
from bus.messages.limits import CHUNK_BYTES
from bus.messages.weights import Chunk, Manifest, Prepared, PrepareUpdate, PullChunk, PullManifest
from bus.security.zmq_dialer import Dialer
from bus.shm import PinnedSegment, SegmentGone, SegmentReader
from engine_worker.engine import TensorSpec

PIN_TRIES = 5
"""A segment may be renamed between the manifest and the pin; then the manifest is asked again."""
PIN_PAUSE_S = 0.05
MAX_STAGED = 2
"""More versions staged than this: the oldest is dropped."""


@dataclass(slots=True)
class _Staged:
    manifest: Manifest
    content: Bytes
    pin: PinnedSegment | None
    """None: `content` is a pooled buffer."""


class WeightReceiver:
    """Stages versions for one engine; all methods on one event loop."""

    def __init__(
        self, specs: Sequence[TensorSpec], *, may_map: bool = True, dialer: Dialer | None = None
    ) -> None:
        """`specs` is what the engine expects; `may_map=False` always pulls over tcp."""
        self._specs = {each.name: each for each in specs}
        self._may_map = may_map
        self._dialer = dialer
        self._reader = SegmentReader()
        self._staged: dict[int, _Staged] = {}
        self._spare: Bytes | None = None

    async def pull(self, prepare: PrepareUpdate, *, timeout_s: float) -> Prepared:
        """Stage a version beside the old weights and verify every tensor; idempotent.

        Raises:
            Refused: its tensors are not those of the engine (`.field` names one); nothing was
                allocated.
            EngineFailed: it could not be had, or its bytes are wrong; nothing is staged.
        """
        began = time.perf_counter()
        if prepare.version not in self._staged:
            try:
                async with asyncio.timeout(timeout_s), BulkLink(prepare.bulk, self._dialer) as link:
                    staged = await self._fetch(link, prepare)
            except TimeoutError as error:
                raise EngineFailed(_too_late(prepare, timeout_s)) from error
            except RemoteProtocolError as error:
                problem = Problem(code="internal", message=str(error), outcome="failed")
                raise EngineFailed(problem) from error
            while len(self._staged) >= MAX_STAGED:
                self._forget(next(iter(self._staged)))
            self._staged[prepare.version] = staged
        staged = self._staged[prepare.version]
        return Prepared(
            version=prepare.version,
            size_bytes=sum(each.size_bytes for each in staged.manifest.tensors),
            transport="tcp" if staged.pin is None else "shm",
            pull_ms=(time.perf_counter() - began) * 1e3,
        )

    def staged(self, version: int) -> Mapping[str, Bytes]:
        """Raw little-endian bytes by tensor name, uint8 [size_bytes] each; valid until `drop`.

        Raises:
            KeyError: the version is not staged.
        """
        staged = self._staged[version]
        return {each.name: bytes_of(staged.content, each) for each in staged.manifest.tensors}

    def drop(self, version: int) -> None:
        """The version is installed or given up: nobody reads its bytes any more. Idempotent."""
        staged = self._forget(version)
        if staged is not None and staged.pin is None:
            self._spare = staged.content

    def close(self) -> None:
        """Drop everything."""
        for version in list(self._staged):
            self.drop(version)
        self._spare = None
        self._reader.forget()

    def _forget(self, version: int) -> _Staged | None:
        # Its buffer is not used again: whoever did not call `drop` may still read it.
        staged = self._staged.pop(version, None)
        if staged is not None and staged.pin is not None:
            staged.pin.release()
        return staged

    async def _fetch(self, link: BulkLink, prepare: PrepareUpdate) -> _Staged:
        for attempt in range(PIN_TRIES):
            manifest = await self._ask_manifest(link, prepare)
            if not self._may_map or manifest.host != host_id():
                break
            try:
                pin = self._reader.pin(manifest.segment, total_bytes(manifest.tensors))
            except SegmentGone:
                await asyncio.sleep(PIN_PAUSE_S * attempt)  # the store is sealing or restarting
                continue
            try:
                await _verify(pin.content, manifest)
            except BaseException:
                pin.release()
                self._reader.forget()
                raise
            return _Staged(manifest, pin.content, pin)
        else:
            manifest = await self._ask_manifest(link, prepare)
        content = self._buffer(total_bytes(manifest.tensors))
        await link.ask_all(_chunks(link, manifest, content))
        await _verify(content, manifest)
        return _Staged(manifest, content, None)

    async def _ask_manifest(self, link: BulkLink, prepare: PrepareUpdate) -> Manifest:
        ask = PullManifest(policy=prepare.policy, version=prepare.version)
        manifest = await link.ask("pull_manifest", ask)
        if not isinstance(manifest, Manifest) or manifest.version != prepare.version:
            raise RemoteProtocolError("the store answered pull_manifest with something else")
        problem = check_tensors(manifest.tensors) or self._misfit(manifest)
        if problem is not None:
            raise Refused(problem)
        return manifest

    def _misfit(self, manifest: Manifest) -> Problem | None:
        """Why the engine cannot take these tensors; None if it can."""
        for tensor in manifest.tensors:
            spec = self._specs.get(tensor.name)
            if spec is None:
                return _wrong_tensor(tensor.name, "the engine has no such tensor")
            if (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
                message = (
                    f"published as {tensor.dtype} {list(tensor.shape)}, the engine has "
                    f"{spec.dtype} {list(spec.shape)}"
                )
                return _wrong_tensor(tensor.name, message)
        missing = self._specs.keys() - {each.name for each in manifest.tensors}
        if missing:
            return _wrong_tensor(min(missing), f"{len(missing)} tensors of the engine are missing")
        return None

    def _buffer(self, size_bytes: int) -> Bytes:
        spare, self._spare = self._spare, None
        if spare is not None and len(spare) >= size_bytes:
            return spare
        return np.empty(size_bytes, np.uint8)


async def _verify(content: Bytes, manifest: Manifest) -> None:
    wrong = await asyncio.to_thread(first_mismatch, content, manifest.tensors)
    if wrong is not None:
        message = f"tensor {wrong.name!r} did not arrive as it was published"
        raise EngineFailed(
            Problem(
                code="digest_mismatch",
                message=message,
                outcome="failed",
                field=f"tensors.{wrong.name}",
            )
        )


def _chunks(
    link: BulkLink, manifest: Manifest, content: Bytes
) -> Iterator[Callable[[], Awaitable[None]]]:
    size_bytes = total_bytes(manifest.tensors)
    for offset in range(0, size_bytes, CHUNK_BYTES):
        ask = PullChunk(
            policy=manifest.policy,
            version=manifest.version,
            offset=offset,
            size_bytes=min(CHUNK_BYTES, size_bytes - offset),
        )
        yield partial(_pull_chunk, link, ask, content)


async def _pull_chunk(link: BulkLink, ask: PullChunk, content: Bytes) -> None:
    chunk = await link.ask("pull_chunk", ask)
    if (
        not isinstance(chunk, Chunk)
        or chunk.offset != ask.offset
        or len(chunk.content) != ask.size_bytes
    ):
        raise RemoteProtocolError("the store answered pull_chunk with other bytes")
    content.data[ask.offset : ask.offset + ask.size_bytes] = chunk.content


def _wrong_tensor(name: str, reason: str) -> Problem:
    message = f"tensor {name!r}: {reason}"
    return Problem(
        code="bad_request", message=message, outcome="not_started", field=f"tensors.{name}"
    )


def _too_late(prepare: PrepareUpdate, timeout_s: float) -> Problem:
    message = f"version {prepare.version} was not here after {timeout_s:g} s from {prepare.bulk}"
    return Problem(code="deadline", message=message, outcome="failed")
