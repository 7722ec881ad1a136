"""Putting tensors into a reserved version: into its segment, or over the wire in chunks.

Copies and digests run in threads, with the interpreter lock released, so that the event loop of
the trainer keeps its lease meanwhile.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from rolloutbus.bus.host import host_id
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, bytes_of, total_bytes
from rolloutbus.bus.weights.shm import SegmentWriter
from rolloutbus.bus.wire.errors import ActorStopped
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.weights import PushChunk, Reserved, Tensor
from rolloutbus.trainer_adapter.publisher.host_copy import Judgement, put
from rolloutbus.trainer_adapter.publisher.named_tensors import TORCH_DTYPES
from rolloutbus.trainer_adapter.publisher.tensor_source import TensorSource

COPIERS = 2
"""Threads that copy side by side: memory is faster than one core."""

T = TypeVar("T")


class CopyWatch:
    """Tells of a copy under way, and can stop it."""

    def __init__(self, on_copied: Callable[[int], None]) -> None:
        """`on_copied` gets the bytes copied so far, in the threads that copy."""
        self._on_copied = on_copied
        self._lock = threading.Lock()
        self._n_copied = 0
        self._is_stopped = False

    def stop(self) -> None:
        """Let it end with ActorStopped at the next tensor."""
        self._is_stopped = True

    def require_wanted(self) -> None:
        """Another tensor is about to be copied.

        Raises:
            ActorStopped: nobody wants it any more.
        """
        if self._is_stopped:
            raise ActorStopped("the copy was stopped")

    def copied(self, n_bytes: int) -> None:
        """So many more bytes have been copied."""
        with self._lock:
            self._n_copied += n_bytes
            n_copied = self._n_copied
        self._on_copied(n_copied)


class Written(NamedTuple):
    """A version whose bytes have been copied."""

    content: Bytes
    """uint8 [all bytes of the version], as they are published."""
    is_in_store: bool
    """They lie in the store's segment; else they still have to be pushed."""
    judgements: list[Judgement]
    """Per tensor, in the layout's order."""


class WeightWriter:
    """Keeps its mappings and its buffer from version to version."""

    def __init__(self, *, may_map: bool = True, n_copiers: int = COPIERS) -> None:
        """`may_map=False` always pushes over the bulk socket."""
        self._may_map = may_map
        self._n_copiers = n_copiers
        self._segments = SegmentWriter()
        self._buffer: Bytes | None = None

    async def copy(
        self,
        reserved: Reserved,
        layout: Sequence[Tensor],
        source: TensorSource,
        watch: CopyWatch,
    ) -> Written:
        """Copy all tensors of `source` to their places in `layout`; afterwards they may change.

        Raises:
            SegmentGone: the reservation has lapsed.
        """
        size_bytes = total_bytes(layout)
        is_mapped = self._may_map and reserved.host == host_id()
        if is_mapped:
            content = self._segments.content(reserved.segment, size_bytes)
        else:
            content = self._buffer_of(size_bytes)
        work = partial(copy_all, content, layout, source, watch, self._n_copiers)
        return Written(content, is_mapped, await in_thread(work, watch.stop))

    async def push(self, content: Bytes, reserved: Reserved, policy: str, bulk: BulkLink) -> None:
        """Send what was copied to a store that cannot be written to in place.

        Raises:
            EngineFailed: the store would not take the bytes.
        """
        async with bulk as link:
            await link.ask_all(_pushes(link, policy, reserved.version, content))

    def tidy(self) -> None:
        """A version was given up: let go of its segment."""
        self._segments.tidy()

    def forget(self) -> None:
        """Give back what is kept between versions."""
        self._segments.forget()
        self._buffer = None

    def _buffer_of(self, size_bytes: int) -> Bytes:
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._buffer = np.zeros(size_bytes, np.uint8)
        return self._buffer[:size_bytes]


async def in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Do `work` in a thread; when cancelled, `stop` it and wait for its end all the same.

    A thread that went on alone would write into what is another version's by then.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait((working,))
        working.exception()
        raise


def copy_all(
    content: Bytes,
    layout: Sequence[Tensor],
    source: TensorSource,
    watch: CopyWatch,
    n_copiers: int,
) -> list[Judgement]:
    """Copy everything into `content` by so many threads; what was found out, per tensor."""
    judgements: list[Judgement] = []

    def copy(tensor: Tensor, value: torch.Tensor) -> Judgement:
        watch.require_wanted()
        judged = put(bytes_of(content, tensor), TORCH_DTYPES[tensor.dtype], value)
        watch.copied(tensor.size_bytes)
        return judged

    with (
        torch.no_grad(),
        ThreadPoolExecutor(n_copiers, "rolloutbus-copy") as copiers,
        closing(source.buckets()) as buckets,
    ):
        for bucket in buckets:
            places = layout[len(judgements) : len(judgements) + len(bucket)]
            judgements += copiers.map(copy, places, bucket)
            del bucket  # or it would be held while the next one is gathered
    return judgements


def tensors_in(content: Bytes, layout: Sequence[Tensor]) -> list[torch.Tensor]:
    """Views of a version's tensors, on this host."""
    whole = cast("torch.Tensor", cast("Any", torch).from_numpy(content))  # untyped
    return [
        whole[each.offset : each.offset + each.size_bytes]
        .view(TORCH_DTYPES[each.dtype])
        .view(each.shape)
        for each in layout
    ]


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
