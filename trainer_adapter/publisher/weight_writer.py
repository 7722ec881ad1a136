"""Putting tensors into a reserved version: into its segment, or over the wire in chunks.

Copies and digests run in threads, with the interpreter lock released, so that the event loop of
the trainer keeps its lease meanwhile.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
import xxhash

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.cuda_memory import locked_copies
from rolloutbus.bus.weights.manifest import Bytes, bytes_of
from rolloutbus.bus.weights.page_lock import cut
from rolloutbus.bus.weights.shm import SegmentGone, SegmentWriter, host_id
from rolloutbus.bus.weights.side_by_side import n_threads
from rolloutbus.bus.wire.errors import ActorStopped, Refused
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import PushChunk, Reserved, Tensor
from rolloutbus.trainer_adapter.publisher.tensor_source import TORCH_DTYPES, TensorSource

_log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""Of a host's tensor: little enough to stay in the cache until it has been judged."""
PINNED_BYTES = 32 << 20
"""Of a GPU's tensor that are under way at once; two such buffers per thread that copies."""


class Judgement(NamedTuple):
    """What was found out about a tensor while it was copied."""

    digest: int
    """xxh3-64 of its bytes."""
    is_finite: bool
    """No element is infinite or NaN; always true of integers."""
    is_zero: bool
    """Every element is 0; never true of integers and of tensors without elements."""


def put(place: Bytes, target_dtype: torch.dtype, source: torch.Tensor) -> Judgement:
    """Copy `source` to `place`, uint8 [its bytes as `target_dtype`], cast to that type."""
    copied = _copy(place, target_dtype, source)
    return _judged([copied], [source], [target_dtype], _queue_ranges([source], [target_dtype]))[0]


class _Copy(NamedTuple):
    """What was found out about a tensor's bytes on the host."""

    digest: int
    ranges: list[tuple[float, float]]
    """Smallest and largest elements of its pieces; none of a GPU's tensor, and of integers."""


def _copy(place: Bytes, target_dtype: torch.dtype, source: torch.Tensor) -> _Copy:
    if not source.numel():
        return _Copy(xxhash.xxh3_64_intdigest(place.data), [])
    target = torch.frombuffer(place.data, dtype=target_dtype)
    hasher = xxhash.xxh3_64()
    ranges: list[tuple[float, float]] = []
    start = 0
    for piece in _pieces(source, target):
        copied = target[start : start + len(piece)]
        if piece.data_ptr() != copied.data_ptr():
            copied.copy_(piece)
        hasher.update(place[start * copied.itemsize : (start + len(piece)) * copied.itemsize].data)
        if _is_float(target_dtype) and not source.is_cuda:
            ranges.append(_range(copied))
        start += len(piece)
    return _Copy(hasher.intdigest(), ranges)


def _judged(
    copies: Sequence[_Copy],
    sources: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    on_gpu: Mapping[int, torch.Tensor],
) -> list[Judgement]:
    """Judgements of what was copied; `on_gpu` as of `_queue_ranges`, waited for here at once."""
    found: dict[int, list[float]] = {}
    if on_gpu:
        first, *_ = on_gpu.values()
        ends = torch.stack([each.to(first.device) for each in on_gpu.values()])
        lists = cast("list[list[float]]", cast("Any", ends).tolist())  # untyped
        found = dict(zip(on_gpu, lists, strict=True))
    judgements: list[Judgement] = []
    for i, (copied, source, dtype) in enumerate(zip(copies, sources, dtypes, strict=True)):
        ranges = [*copied.ranges, *([found[i]] if i in found else [])]
        is_finite = all(low - low == high - high == 0.0 for low, high in ranges)
        is_zero = all(low == high == 0.0 for low, high in ranges)
        is_judged = bool(source.numel()) and _is_float(dtype)
        judgements.append(Judgement(copied.digest, is_finite, is_zero and is_judged))
    return judgements


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _split(flat: torch.Tensor, n_elements: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(flat), n_elements):
        yield flat[start : start + n_elements]


def _pieces(source: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields `source` in 1-D pieces on the host; a strided tensor is first copied to `target`."""
    n_elements = max(1, PIECE_BYTES // target.itemsize)
    if source.is_cuda:
        # Whole: between two calls a thread waits for the interpreter, up to 5 ms for a busy loop.
        yield from _from_gpu(source, target)
    elif source.is_contiguous():
        yield from _split(source.view(-1), n_elements)
    else:
        target.view(source.shape).copy_(source)
        yield from _split(target, n_elements)


def _from_gpu(source: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces on the host, cast; while one is read the GPU writes the next.

    Where `target` is page-locked the GPU writes there, elsewhere into a pinned buffer.
    """
    flat = _flat(source)
    stream = torch.cuda.Stream(source.device)
    stream.wait_stream(torch.cuda.current_stream(source.device))
    if source.dtype == target.dtype and _copied_at_once(flat, target, stream):
        yield target
        return
    buffers: list[torch.Tensor] = []
    under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None
    try:
        with torch.cuda.stream(stream):
            for number, (start, stop) in enumerate(_places(target)):
                landed = target[start:stop]
                if not landed.is_pinned():
                    buffers = buffers or _pinned_buffers(target)
                    landed = buffers[number % 2][: stop - start]
                landed.copy_(flat[start:stop].to(target.dtype), non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
                if under_way is not None:
                    under_way[1].synchronize()
                    yield under_way[0]
                under_way = (landed, event)
            if under_way is not None:
                under_way[1].synchronize()
                yield under_way[0]
    finally:
        # After an error, too: the GPU would write to memory of the store that is another version's,
        # or read what has been freed.
        stream.synchronize()


def _copied_at_once(flat: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> bool:
    """Copies all of a GPU's tensor, if all of `target` is page-locked: one wait for the GPU.

    Beside a busy event loop each wait costs up to 5 ms more, until it lets go of the interpreter.
    """
    copies = locked_copies()
    source, place = flat.data_ptr(), target.data_ptr()
    pieces = [*cut(place, target.nbytes, PINNED_BYTES)]
    if copies is None or not all(copies.is_locked(place + start) for start, _ in pieces):
        return False
    try:
        with torch.cuda.device(flat.device):
            for start, stop in pieces:
                copies.copy(place + start, source + start, stop - start, stream.cuda_stream)
    finally:
        stream.synchronize()  # after an error, too: see `_from_gpu`
    return True


def _flat(source: torch.Tensor) -> torch.Tensor:
    """All elements in 1-D, as bytes say them: torch may only have noted that they are conjugate."""
    return source.resolve_conj().resolve_neg().contiguous().view(-1)


def _places(target: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(first element, end) of the pieces that are copied at once."""
    for start, stop in cut(target.data_ptr(), target.nbytes, PINNED_BYTES):
        yield start // target.itemsize, stop // target.itemsize


def _pinned_buffers(target: torch.Tensor) -> list[torch.Tensor]:
    n_elements = min(PINNED_BYTES // target.itemsize, len(target))
    return [torch.empty(n_elements, dtype=target.dtype, pin_memory=True) for _ in range(2)]


def _range(piece: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest element; NaN if there is one."""
    if piece.is_complex():
        piece = torch.view_as_real(piece)
    elif piece.itemsize == 1:
        piece = piece.float()
    low, high = torch.aminmax(piece)
    return float(low), float(high)


def _queue_ranges(
    sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> dict[int, torch.Tensor]:
    """Begin to search each GPU tensor for its smallest and largest element, without waiting.

    Beside an engine on the same GPU a wait takes some 9 ms: all tensors share one instead.

    Returns:
        By the place of each floating-point tensor of a GPU: float64 [2], NaN if there is one.
    """
    return {
        i: _range_on_gpu(source, dtype)
        for i, (source, dtype) in enumerate(zip(sources, dtypes, strict=True))
        if source.is_cuda and source.numel() and _is_float(dtype)
    }


def _range_on_gpu(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Ends of a whole tensor as `dtype`, where it lies; parts of it are cast at a time."""
    flat = _flat(source)
    is_read_as_it_is = source.dtype == dtype and dtype.itemsize > 1
    n_elements = len(flat) if is_read_as_it_is else PINNED_BYTES // dtype.itemsize
    found: list[torch.Tensor] = []
    for part in _split(flat, n_elements):
        cast_part = part.to(dtype)
        if cast_part.is_complex():
            cast_part = torch.view_as_real(cast_part)
        elif cast_part.itemsize == 1:
            cast_part = cast_part.float()
        found += torch.aminmax(cast_part)
    return torch.stack([torch.stack(found[::2]).amin(), torch.stack(found[1::2]).amax()]).double()


WeightCheck = Literal["finite", "off"]


class Soundness:
    """Compares each version of one policy with the one committed before."""

    def __init__(self, check: WeightCheck = "finite") -> None:
        self._check = check
        self._nonzero: set[str] = set()
        """Tensors of the last version that were not all zero; integers are not looked at."""

    def require(
        self,
        layout: Sequence[Tensor],
        judgements: Sequence[Judgement],
        *,
        allow_zeros: bool = False,
    ) -> None:
        """Check what is about to be sealed.

        A tensor of nothing but zeros is an error only if it had other values in the last version:
        fresh adapters and biases are zero, a forgotten gather is, too. `allow_zeros`: it is none.

        Raises:
            Refused: a tensor holds infinity or NaN, or was set to zero; `.field` names it.
        """
        if self._check == "off":
            return
        for tensor, judged in zip(layout, judgements, strict=True):
            if not judged.is_finite:
                raise _unsound(tensor, "it holds infinity or NaN: has the training diverged?")
            if judged.is_zero and tensor.name in self._nonzero and not allow_zeros:
                why = (
                    "it is all zero, and was not in the last version: has a gather been forgotten? "
                    "If it should be, publish it with allow_zeros=True"
                )
                raise _unsound(tensor, why)

    def committed(self, layout: Sequence[Tensor], judgements: Sequence[Judgement]) -> None:
        """Records `layout` as the last committed version."""
        self._nonzero = {
            tensor.name
            for tensor, judged in zip(layout, judgements, strict=True)
            if not judged.is_zero and not tensor.dtype.startswith(("I", "U", "BOOL"))
        }

    def restored(self) -> None:
        """Forgets the last version's values: the policy went back to an older version."""
        self._nonzero = set()


def _unsound(tensor: Tensor, message: str) -> Refused:
    return Refused(Problem("bad_request", message, "not_started", field=f"tensors.{tensor.name}"))


MIN_COPIERS = 2
"""Threads that copy side by side, also where there are few cores: one may wait for a device."""

T = TypeVar("T")


OnWritten = Callable[[Tensor, int], None]
"""(tensor of the layout, digest of its bytes): they are in their place; called in any thread."""


class CopyWatch:
    """Reports how far a copy has come, and can stop it."""

    def __init__(self, on_copied: Callable[[int], None] = lambda _: None) -> None:
        """`on_copied` gets the bytes copied so far, in the threads that copy."""
        self._on_copied = on_copied
        self._lock = threading.Lock()
        self._n_copied = 0
        self._is_stopped = False

    def stop(self) -> None:
        """Stops the copy with ActorStopped at the next tensor."""
        self._is_stopped = True

    def require_wanted(self) -> None:
        """Raises if the copy was stopped; called before each tensor.

        Raises:
            ActorStopped: `stop` was called.
        """
        if self._is_stopped:
            raise ActorStopped("the copy was stopped")

    def copied(self, n_bytes: int) -> None:
        """Adds to the bytes copied so far, and reports the sum."""
        with self._lock:
            self._n_copied += n_bytes
            n_copied = self._n_copied
        self._on_copied(n_copied)


class Room(NamedTuple):
    """A place for the bytes of a version."""

    content: Bytes
    """uint8 [all bytes of the version], as they are published."""
    is_in_store: bool
    """It lies in the store's segment; else its bytes still have to be pushed."""


class Copied(NamedTuple):
    """What was found out while all tensors of a version were copied."""

    judgements: list[Judgement]
    """Per tensor, in the layout's order."""
    gpu: torch.device | None
    """That some of them came from; None: none did."""


class Written(NamedTuple):
    """A version with all bytes copied."""

    content: Bytes
    """uint8 [all bytes of the version], as they are published."""
    is_in_store: bool
    """They lie in the store's segment; else they still have to be pushed."""
    judgements: list[Judgement]
    """Per tensor, in the layout's order."""
    gpu: torch.device | None
    """That some of them came from; None: none did."""


class WeightWriter:
    """Keeps its mappings and its buffer from version to version."""

    def __init__(self, *, may_map: bool = True, n_copiers: int = 0) -> None:
        """`may_map=False` always pushes over the bulk socket; `n_copiers` 0: by the cores."""
        self._may_map = may_map
        self._n_copiers = n_copiers or max(MIN_COPIERS, n_threads())
        self._segments = SegmentWriter()
        self._buffer: Bytes | None = None

    async def copy(
        self,
        room: Room,
        layout: Sequence[Tensor],
        source: TensorSource,
        watch: CopyWatch,
        on_written: OnWritten | None = None,
    ) -> Written:
        """Copy all tensors of `source` to their places in `layout`; afterwards they may change."""
        work = partial(copy_all, room.content, layout, source, watch, self._n_copiers, on_written)
        return Written(*room, *await in_thread(work, watch.stop))

    def room(self, reserved: Reserved, size_bytes: int) -> Room:
        """Where a version's bytes are to be put: its segment, if this process may map it."""
        if self._may_map and reserved.host == host_id():
            try:
                content = self._segments.content(reserved.segment, size_bytes)
                return Room(content, is_in_store=True)
            except SegmentGone as error:
                # Another user's; or gone, which the push tells.
                _log.warning("the store's memory cannot be used, its bytes are pushed: %s", error)
        return Room(self._buffer_of(size_bytes), is_in_store=False)

    async def push(self, content: Bytes, reserved: Reserved, policy: str, bulk: BulkLink) -> None:
        """Send what was copied to a store that cannot be written to in place.

        Raises:
            EngineFailed: the store would not take the bytes.
        """

        async def push_from(offset: int) -> None:
            # Encoded at once, so the view is as good as the bytes, and saves a copy of them.
            part = cast("bytes", content[offset : offset + CHUNK_BYTES].data)
            await bulk.ask("push_chunk", PushChunk(policy, reserved.version, offset, part))

        async with bulk:
            offsets = range(0, len(content), CHUNK_BYTES)
            await bulk.ask_all(partial(push_from, offset) for offset in offsets)

    def lock_pages(self, gpu: torch.device) -> None:
        """A version of this GPU has come through: the next one is copied to its memory by itself.

        The GPU is told, since a thread's current one may be another, which this process would only
        then begin to use.
        """
        self._segments.lock_pages(gpu.index)

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


async def in_thread(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Do `work` in a thread; when cancelled, `stop` it and wait for its end all the same.

    A thread that went on alone would write into what is another version's by then.
    """
    given = [work]

    def worked() -> T:
        return given.pop()()  # the thread keeps hold of what it is given, even when it has ended

    working = asyncio.ensure_future(asyncio.to_thread(worked))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop()
        await ended(working)
        raise


async def ended(work: asyncio.Future[T]) -> None:
    """Wait until it has ended, well or not, however often this is cancelled meanwhile.

    A deadline that passes and a caller that gives up are two cancellations.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        work.exception()  # retrieved: asyncio would log it
    if cancelled is not None:
        raise cancelled


def copy_all(
    content: Bytes,
    layout: Sequence[Tensor],
    source: TensorSource,
    watch: CopyWatch,
    n_copiers: int,
    on_written: OnWritten | None = None,
) -> Copied:
    """Copy everything into `content` by so many threads, which call `on_written`."""
    judgements: list[Judgement] = []
    gpu: torch.device | None = None

    def copy(tensor: Tensor, value: torch.Tensor) -> _Copy:
        watch.require_wanted()
        copied = _copy(bytes_of(content, tensor), TORCH_DTYPES[tensor.dtype], value)
        watch.copied(tensor.size_bytes)
        if on_written is not None:
            on_written(tensor, copied.digest)
        return copied

    with (
        torch.no_grad(),
        ThreadPoolExecutor(n_copiers, "rolloutbus-copy") as copiers,
        closing(source.buckets()) as buckets,
    ):
        for bucket in buckets:
            places = layout[len(judgements) : len(judgements) + len(bucket)]
            if gpu is None:
                gpu = next((each.device for each in bucket if each.is_cuda), None)
                if gpu is not None:
                    _make_ready(content, n_copiers, gpu)
            judgements += _copied_and_judged(partial(copiers.map, copy), places, bucket)
            del bucket  # or it would be held while the next one is gathered
    return Copied(judgements, gpu)


def _copied_and_judged(
    begin: Callable[[list[Tensor], list[torch.Tensor]], Iterator[_Copy]],
    places: Sequence[Tensor],
    bucket: Sequence[torch.Tensor],
) -> list[Judgement]:
    """Judgements in the bucket's order; `begin` has others copy, while GPUs judge."""
    # The largest first, or others would wait for it alone.
    order = sorted(range(len(bucket)), key=lambda i: -places[i].size_bytes)
    copying = begin([places[i] for i in order], [bucket[i] for i in order])
    dtypes = [TORCH_DTYPES[each.dtype] for each in places]
    on_gpu = _queue_ranges(bucket, dtypes)
    copies = dict(zip(order, copying, strict=True))
    return _judged([copies[i] for i in range(len(bucket))], bucket, dtypes, on_gpu)


def _make_ready(content: Bytes, n_copiers: int, gpu: torch.device) -> None:
    """Have CUDA make what copiers need of it, which torch keeps then.

    While one of them had it made the others would wait, and hold the interpreter.
    """
    torch.cuda.Stream(gpu)
    ends = (torch.as_tensor(end) for end in (content[:1], content[-1:]))
    if len(content) >= n_copiers * PINNED_BYTES and not all(end.is_pinned() for end in ends):
        buffers = [
            torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(2 * n_copiers)
        ]
        del buffers


def tensors_in(content: Bytes, layout: Sequence[Tensor]) -> list[torch.Tensor]:
    """Views of a version's tensors, on this host."""
    whole = cast("torch.Tensor", cast("Any", torch).from_numpy(content))  # untyped
    return [
        whole[each.offset : each.offset + each.size_bytes]
        .view(TORCH_DTYPES[each.dtype])
        .view(each.shape)
        for each in layout
    ]
