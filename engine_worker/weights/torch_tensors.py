"""Tensors on a device: types by name, GPUs by UUID, copies, checksums and searches for NaN."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from rolloutbus.bus.weights.manifest import ALIGN_BYTES, DTYPES, Bytes, checksum_by
from rolloutbus.bus.wire.messages.weights import Bucket

BOUNCE_BYTES = 64 * 1024 * 1024
"""Pinned memory that bytes pass through on their way: several times as fast as without."""
SPARE_BYTES = 1 << 30
"""Of GPU memory, left to others."""


class DeviceCopies:
    """Copies versions to one device beside the steps: an update then copies within the GPU.

    Does nothing for a CPU. Calls from one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = {}
        self._spare: torch.Tensor | None = None
        """Memory that goes from version to version."""

    def stage(self, version: int, tensors: Mapping[str, Bytes]) -> None:
        """Copy a version's tensors, uint8 [size_bytes] each, if there is room for all of them."""
        self.drop(version)
        if self._device.type != "cuda":
            return
        memory = self._room(sum(_aligned(raw.nbytes) for raw in tensors.values()))
        if memory is None:
            return
        places: dict[str, torch.Tensor] = {}
        start = 0
        for name, raw in tensors.items():
            places[name] = memory[start : start + raw.nbytes]
            start += _aligned(raw.nbytes)
        self._copy(tensors, places)
        self._held[version] = memory, places

    def of(self, version: int) -> Mapping[str, torch.Tensor]:
        """Copies on the device, uint8 [size_bytes] each; none if there was no room."""
        return self._held[version][1] if version in self._held else {}

    def drop(self, version: int) -> None:
        """Drop a version that nothing reads any more. Idempotent."""
        if version in self._held:
            self._spare, _ = self._held.pop(version)

    def _room(self, size_bytes: int) -> torch.Tensor | None:
        memory, self._spare = self._spare, None
        if memory is not None and len(memory) >= size_bytes:
            return memory
        memory = None  # given back before more is taken
        free_bytes: int = cast("Any", torch.cuda).mem_get_info(self._device)[0]  # untyped
        if free_bytes < size_bytes + SPARE_BYTES:
            return None
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _copy(self, tensors: Mapping[str, Bytes], places: Mapping[str, torch.Tensor]) -> None:
        stream = cast("Any", torch.cuda).Stream(self._device)  # untyped
        bounces = [torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        done = [cast("Any", torch.cuda).Event() for _ in bounces]
        turn = 0
        with torch.cuda.stream(stream):
            for name, raw in tensors.items():
                for start in range(0, raw.nbytes, BOUNCE_BYTES):
                    part = raw[start : start + BOUNCE_BYTES]
                    done[turn].synchronize()
                    bounces[turn].numpy()[: len(part)] = part
                    into = places[name][start : start + len(part)]
                    into.copy_(bounces[turn][: len(part)], non_blocking=True)
                    done[turn].record(stream)
                    turn = 1 - turn
        stream.synchronize()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


_CHUNK = 1 << 26
"""Elements at once: few kernels, and little memory beside what is judged."""
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def judge_on_device(raw: torch.Tensor, dtype: str) -> tuple[int, bool]:
    """How many numbers in uint8 [whole elements] are not finite, and whether every byte is 0."""
    n_wrong = 0
    floats = DTYPES[dtype].floats if dtype in DTYPES else None
    if floats is not None and len(raw):
        ones = floats.not_finite
        for bits in _parts(raw.view(_SIGNED[floats.size_bytes])):
            n_wrong += int(((bits & ones) == ones).sum())
    return n_wrong, not any(bool(part.any()) for part in _parts(raw))


def _parts(raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cast("Any", raw).split(_CHUNK)  # untyped


TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.torch) for name, each in DTYPES.items() if each.torch
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_TYPES.items()}


_CHUNK_WORDS = 1 << 23
"""64 MiB at once: few kernels, and little memory beside what is summed."""


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
    for piece, bucket in zip(pieces, buckets, strict=True):
        odd = torch.arange(1, 2 * _CHUNK_WORDS, 2, device=piece.device)
        if checksum_by(piece[: bucket.size_bytes], odd) != bucket.checksum:
            return bucket
    return None
