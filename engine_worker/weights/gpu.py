"""What a GPU is called, and sums that it computes of its own memory."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from rolloutbus.bus.weights.checksum import checksum_by
from rolloutbus.bus.wire.messages.weights import Bucket

_CHUNK_WORDS = 1 << 23
"""64 MiB at once: few kernels, and little memory beside what is summed."""


def gpu_uuid(device: torch.device) -> str:
    """Its name in every process, as nvidia-smi shows it; empty for a CPU."""
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
    """The first bucket whose checksum is not its piece's, uint8 [at least its size]."""
    for piece, bucket in zip(pieces, buckets, strict=True):
        odd = torch.arange(1, 2 * _CHUNK_WORDS, 2, device=piece.device)
        if checksum_by(piece[: bucket.size_bytes], odd) != bucket.checksum:
            return bucket
    return None
