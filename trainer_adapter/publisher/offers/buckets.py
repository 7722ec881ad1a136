"""A version as a few large pieces of memory: runs of whole tensors, laid out as in the store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rolloutbus.bus.weights.checksum import checksum, checksum_by
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.trainer_adapter.publisher.named_tensors import TORCH_DTYPES

_CHUNK_WORDS = 1 << 23
"""64 MiB at once on a GPU: few kernels, and little memory beside what is summed."""


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Tensors `first` to `end` - 1 of a layout, and the bytes between them."""

    first: int
    end: int
    start: int
    """First byte within the version."""
    size_bytes: int


def spans_of(layout: Sequence[Tensor], limit_bytes: int) -> Iterator[BucketSpan]:
    """As few as can be of at most `limit_bytes` each; a larger tensor is alone in its own."""
    first = 0
    for i, tensor in enumerate(layout):
        start, is_last = layout[first].offset, i + 1 == len(layout)
        end = tensor.offset + tensor.size_bytes if is_last else layout[i + 1].offset
        after = end if is_last else layout[i + 1].offset + layout[i + 1].size_bytes
        if is_last or after - start > limit_bytes:
            yield BucketSpan(first, i + 1, start, end - start)
            first = i + 1


@torch.no_grad()
def fill(
    memory: torch.Tensor,
    span: BucketSpan,
    layout: Sequence[Tensor],
    sources: Sequence[torch.Tensor],
) -> None:
    """Copy the span's tensors into `memory`, uint8 [at least its size], cast on the way."""
    for i in range(span.first, span.end):
        tensor = layout[i]
        place = memory[tensor.offset - span.start :][: tensor.size_bytes]
        if tensor.size_bytes:
            place.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape).copy_(sources[i])


def checksum_of(memory: torch.Tensor) -> int:
    """Of uint8 [n] on any device, computed there."""
    if memory.device.type == "cpu":
        return checksum(memory.numpy())
    return checksum_by(memory, torch.arange(1, 2 * _CHUNK_WORDS, 2, device=memory.device))
