"""Putting tensors into a reserved version: into its segment, or over the wire in chunks.

Copies and digests run in a thread, with the interpreter lock released, so that the event loop of
the trainer keeps its lease meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from bus.bulk import BulkLink
from bus.host import host_id
from bus.manifest import Bytes, bytes_of, digest_of, total_bytes
from bus.messages.limits import CHUNK_BYTES
from bus.messages.weights import PushChunk, Reserved, Tensor
from bus.shm import SegmentWriter
from trainer_adapter.named_tensors import DTYPE_NAMES

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class WeightWriter:
    """Keeps its mappings and its buffer from version to version."""

    def __init__(self, *, may_map: bool = True) -> None:
        """`may_map=False` always pushes over the bulk socket."""
        self._may_map = may_map
        self._segments = SegmentWriter()
        self._buffer: Bytes | None = None

    async def write(
        self,
        reserved: Reserved,
        layout: Sequence[Tensor],
        sources: Sequence[torch.Tensor],
        *,
        policy: str,
        bulk: BulkLink,
    ) -> list[int]:
        """Copy `sources` to their places in `layout`; returns a digest per tensor.

        `bulk` is opened only if the store cannot be written to in place.

        Raises:
            SegmentGone: the reservation has lapsed.
            EngineFailed: the store would not take the bytes.
        """
        if self._may_map and reserved.host == host_id():
            content = self._segments.content(reserved.segment, total_bytes(layout))
            return await asyncio.to_thread(_copy_all, content, layout, sources)
        content = self._buffer_of(total_bytes(layout))
        digests = await asyncio.to_thread(_copy_all, content, layout, sources)
        async with bulk as link:
            await link.ask_all(_pushes(link, policy, reserved.version, content))
        return digests

    def _buffer_of(self, size_bytes: int) -> Bytes:
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._buffer = np.zeros(size_bytes, np.uint8)
        return self._buffer[:size_bytes]


@torch.no_grad()
def _copy_all(
    content: Bytes, layout: Sequence[Tensor], sources: Sequence[torch.Tensor]
) -> list[int]:
    digests: list[int] = []
    for tensor, source in zip(layout, sources, strict=True):
        place = bytes_of(content, tensor)
        if tensor.size_bytes:
            target = torch.frombuffer(place.data, dtype=_TORCH_DTYPES[tensor.dtype])
            # One pass: device to host, cast and gather of strides happen in this copy.
            target.view(tensor.shape).copy_(source)
        digests.append(digest_of(place))
    return digests


def _pushes(
    link: BulkLink, policy: str, version: int, content: Bytes
) -> Iterator[Callable[[], Awaitable[None]]]:
    for offset in range(0, len(content), CHUNK_BYTES):
        yield partial(_push, link, policy, version, offset, content[offset : offset + CHUNK_BYTES])


async def _push(link: BulkLink, policy: str, version: int, offset: int, part: Bytes) -> None:
    # Encoded at once, so the view is as good as the bytes, and saves a copy of them.
    content = cast("bytes", part.data)
    body = PushChunk(policy=policy, version=version, offset=offset, content=content)
    await link.ask("push_chunk", body)
