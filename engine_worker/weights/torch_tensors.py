"""Tensors on a device: types by name, GPUs by UUID, copies, checksums and searches for NaN."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, cast

import torch

from rolloutbus.bus.weights.cuda_memory import locked_copies
from rolloutbus.bus.weights.manifest import (
    ALIGN_BYTES,
    DTYPES,
    Bytes,
    FloatBits,
    checksums_on_device,
)
from rolloutbus.bus.weights.page_lock import cut
from rolloutbus.bus.weights.side_by_side import n_threads, side_by_side
from rolloutbus.bus.wire.messages.weights import Bucket

BOUNCE_BYTES = 16 * 1024 * 1024
"""Pinned memory that bytes pass through on their way: several times as fast as without."""
MAX_QUEUED = 64
"""Copies between two looks at how far the GPU has come; at most twice as many are under way."""
COPIERS_BESIDE_STEPS = 2
"""Threads that copy what is not page-locked while steps are computed. Eight take a third of the
time, but a prompt three to six times as long beside them; beside one it is no shorter."""
SPARE_BYTES = 1 << 30
"""Of GPU memory, left to others."""


_Share = list[tuple[Bytes, torch.Tensor]]
"""Bytes of tensors, and where they go."""


class DeviceCopies:
    """Copies versions to one device beside the steps: an update then copies within the GPU.

    Does nothing for a CPU. Calls from one thread at a time.
    """

    def __init__(
        self, device: torch.device, is_computing: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_computing`: whether this process has steps to do that copies may not hold up much."""
        self._device = device
        self._is_computing = is_computing
        self._held: dict[int, tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = {}
        self._spare: torch.Tensor | None = None
        """Memory that goes from version to version."""
        if device.type == "cuda":
            # Torch keeps them. Made for the first version they would hold up steps for 0.3 s.
            with torch.cuda.device(device):
                _ = [_bounce() for _ in range(2 * n_threads())]

    def stage(self, version: int, tensors: Mapping[str, Bytes]) -> None:
        """Copy a version's tensors, uint8 [size_bytes] each, if there is room for all of them."""
        self.drop(version)
        if self._device.type != "cuda":
            return
        if not tensors:
            self.give_back_spare()  # versions come another way now
            return
        memory = self._room(sum(_aligned(raw.nbytes) for raw in tensors.values()))
        if memory is None:
            return
        places: dict[str, torch.Tensor] = {}
        start = 0
        for name, raw in tensors.items():
            places[name] = memory[start : start + raw.nbytes]
            start += _aligned(raw.nbytes)
        whole = [(raw, places[name]) for name, raw in tensors.items()]
        n = n_threads()
        if _is_locked(whole):
            n = 1  # as fast as the link, and a step's own copies wait behind no more than one queue
        elif self._is_computing():
            n = min(n, COPIERS_BESIDE_STEPS)
        shares = _shares(whole, n)
        bounces = [[] if len(shares) == 1 else [_bounce(), _bounce()] for _ in shares]
        for _ in side_by_side(self._copy, [*zip(shares, bounces, strict=True)], start):
            pass
        self._held[version] = memory, places

    def of(self, version: int) -> Mapping[str, torch.Tensor]:
        """Copies on the device, uint8 [size_bytes] each; none if there was no room."""
        return self._held[version][1] if version in self._held else {}

    def drop(self, version: int) -> None:
        """Drop a version that nothing reads any more. Idempotent."""
        held = self._held.pop(version, None)
        if held is not None:
            self._spare, _ = held

    def give_back_spare(self) -> None:
        """Give back the memory that is kept for the next version."""
        if self._spare is not None:
            self._spare = None
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()  # what torch keeps for itself is not free for others

    def _room(self, size_bytes: int) -> torch.Tensor | None:
        memory, self._spare = self._spare, None
        if memory is not None and len(memory) >= size_bytes:
            return memory
        memory = None  # given back before more is taken
        free_bytes: int = cast("Any", torch.cuda).mem_get_info(self._device)[0]  # untyped
        if free_bytes < size_bytes + SPARE_BYTES:
            return None
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:  # others of this GPU were faster
            return None

    def _copy(self, lane: tuple[_Share, list[torch.Tensor]]) -> None:
        """Copy a share, by a thread with a stream of its own.

        What is page-locked is copied as it is, the rest by way of the two tensors of pinned memory.
        """
        share, bounces = lane
        stream = cast("Any", torch.cuda).Stream(self._device)  # untyped
        # Who had this memory before may have work queued there that still uses it.
        stream.wait_stream(cast("Any", torch.cuda).current_stream(self._device))
        done = [cast("Any", torch.cuda).Event() for _ in range(2)]
        queued = _Queued(stream)
        turn = 0
        try:
            with torch.cuda.stream(stream):
                for raw, place in share:
                    source, target = raw.ctypes.data, place.data_ptr()
                    for start, stop in cut(source, raw.nbytes, BOUNCE_BYTES):
                        if queued.copy_locked(target + start, source + start, stop - start):
                            continue
                        into = place[start:stop]
                        bounces = bounces or [_bounce(), _bounce()]
                        done[turn].synchronize()
                        bounces[turn].numpy()[: len(into)] = raw[start:stop]
                        into.copy_(bounces[turn][: len(into)], non_blocking=True)
                        done[turn].record(stream)
                        turn = 1 - turn
        finally:
            stream.synchronize()  # after an error, too: what is freed then must not be written to


class _Queued:
    """Copies from page-locked memory on one stream, some of which are under way."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - untyped
        self._stream = stream
        self._events = [cast("Any", torch.cuda).Event() for _ in range(2)]
        self._copies = locked_copies()
        self._n_queued = 0

    def copy_locked(self, target: int, source: int, size_bytes: int) -> bool:
        """Queue one copy to an address of the GPU; False: its source is not page-locked."""
        if self._copies is None or not self._copies.is_locked(source):
            return False
        self._copies.copy(target, source, size_bytes, self._stream.cuda_stream)
        self._n_queued += 1
        if self._n_queued % MAX_QUEUED == 0:
            # A full queue makes who adds to it wait, and the interpreter with it.
            self._events.reverse()
            self._events[0].record(self._stream)
            self._events[1].synchronize()
        return True


def _bounce() -> torch.Tensor:
    return torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)


def _is_locked(share: _Share) -> bool:
    """Whether all of it is, as far as its ends show."""
    ends = (end for raw, _ in share for end in (raw[:1], raw[-1:]) if len(raw))
    return all(torch.as_tensor(end).is_pinned() for end in ends)


def _shares(pairs: _Share, n: int) -> list[_Share]:
    """At most `n` shares, of about as many bytes."""
    shares: list[_Share] = [[] for _ in range(n)]
    sizes = [0] * len(shares)
    for pair in sorted(pairs, key=lambda each: -each[0].nbytes):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(pair)
        sizes[smallest] += pair[0].nbytes
    return [each for each in shares if each]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.torch) for name, each in DTYPES.items() if each.torch
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_TYPES.items()}


_PART = 1 << 26
"""Bytes of which a copy is made at once, so that little memory is needed beside what is judged."""


def judge_on_device(tensors: Sequence[tuple[torch.Tensor, str]]) -> list[tuple[int, bool]]:
    """Of each tensor how many numbers are not finite, and whether every byte is 0.

    The device is waited for once, not for each tensor: beside a thread that computes, every wait
    costs 5 ms more, until that thread lets go of the interpreter.

    Args:
        tensors: uint8 [whole elements] on one device, each with its type's name.
    """
    if not tensors:
        return []
    ends = torch.stack([_ends(raw, dtype) for raw, dtype in tensors])
    return [
        _verdict(raw, _floats(dtype), low, high)
        for (raw, dtype), (low, high) in zip(tensors, cast("Any", ends).tolist(), strict=True)
    ]


def _floats(dtype: str) -> FloatBits | None:
    return DTYPES[dtype].floats if dtype in DTYPES else None


def _ends(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Smallest and largest number, float64 [2]: both 0 of zeros alone, NaN or infinity if one is.

    Torch compares no numbers of a byte each: theirs is the largest byte without the sign.
    """
    floats = _floats(dtype)
    if not len(raw):
        return torch.zeros(2, dtype=torch.float64, device=raw.device)
    if floats is not None and floats.size_bytes > 1:
        return torch.stack(torch.aminmax(_numbers(raw, TORCH_TYPES[dtype]))).double()
    if floats is None:
        peak = raw.amax().double()
    else:
        sizes = torch.stack([(part & 0x7F).amax() for part in _parts(raw)])
        peak = sizes.amax().double()
        peak = torch.where(peak >= floats.not_finite, torch.inf, peak)
    return torch.stack([peak, peak])


def _numbers(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As real numbers: a complex one is two."""
    numbers = raw.view(dtype)
    return torch.view_as_real(numbers) if dtype.is_complex else numbers


def _verdict(
    raw: torch.Tensor, floats: FloatBits | None, low: float, high: float
) -> tuple[int, bool]:
    """Counted is only what is wrong; -0.0 has a bit that its number does not show."""
    n_wrong = 0
    if floats is not None and not (isfinite(low) and isfinite(high)):
        ones = floats.not_finite
        for bits in _parts(raw):
            numbers = bits.view(_SIGNED[floats.size_bytes])
            n_wrong += int(((numbers & ones) == ones).sum())
    return n_wrong, low == high == 0 and not any(bool(part.any()) for part in _parts(raw))


_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _parts(raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cast("Any", raw).split(_PART)  # untyped


def gpu_uuid(device: torch.device) -> str:
    """A GPU's UUID, as nvidia-smi shows it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    cuda = cast("Any", torch.cuda)  # untyped
    return f"GPU-{cuda.get_device_properties(device).uuid}"


def gpus_of(devices: Iterable[torch.device]) -> tuple[str, ...]:
    """UUIDs of those that are GPUs."""
    return tuple(uuid for uuid in map(gpu_uuid, devices) if uuid)


def device_of(uuid: str) -> torch.device:
    """The GPU of that UUID, by this process's count.

    Raises:
        ValueError: this process does not see it.
    """
    for i in range(torch.cuda.device_count()):
        if gpu_uuid(torch.device("cuda", i)) == uuid:
            return torch.device("cuda", i)
    raise ValueError(f"this process does not see GPU {uuid}")


def first_wrong(pieces: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> Bucket | None:
    """Returns the first bucket whose checksum does not match its piece, uint8 [>= its size]."""
    contents = [piece[: bucket.size_bytes] for piece, bucket in zip(pieces, buckets, strict=True)]
    found = zip(buckets, checksums_on_device(torch, contents), strict=True)
    return next((bucket for bucket, checksum in found if checksum != bucket.checksum), None)
