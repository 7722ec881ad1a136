"""Ways to the bytes of a version that the trainer offers beside the store.

    offers = await offering.prepare(layout, tensors)  # before the version is sealed
    ... seal_version with the offers, publish_version with them but without their buckets
    await offering.serve()  # a task beside that command; cancel it when the command has ended
    await offering.close()  # in any case, also after a failure

The store gets the bytes too: an offer that fails costs time, not the update. Only settings that
cannot be right end it, with a SettingsError of `prepare`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from rolloutbus.bus.weights.manifest import checksum, checksums_on_device
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.bus.wire.messages.weights import Offer, Tensor
from rolloutbus.trainer_adapter.publisher.tensor_source import TORCH_DTYPES


def only_gpu(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The GPU that holds all of them; None if there is no such one."""
    devices = {each.device for each in tensors}
    device = next(iter(devices)) if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str:
    """Its name in every process, as nvidia-smi shows it."""
    cuda = cast("Any", torch.cuda)  # untyped
    return f"GPU-{cuda.get_device_properties(device).uuid}"


def gpus_of(tensors: Sequence[torch.Tensor]) -> set[str]:
    """UUIDs of the GPUs that they are on."""
    return {gpu_uuid(device) for device in {each.device for each in tensors if each.is_cuda}}


def is_shared(gpus: Collection[str], members: Iterable[Member], policy: str) -> bool:
    """Whether a worker of the policy attests that its weights are on one of these GPUs."""
    return any(each.policy == policy and not set(gpus).isdisjoint(each.gpus) for each in members)


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


def checksums_of(pieces: Sequence[torch.Tensor]) -> list[int]:
    """Of uint8 [n] each, all on one device, computed there."""
    if any(each.is_cuda for each in pieces):
        return checksums_on_device(torch, pieces)
    return [checksum(each.numpy()) for each in pieces]


class Offering(Protocol):
    """One way; used for version after version, one at a time."""

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        """Take a copy of `tensors`, cast and laid out as `layout` says, and offer it.

        Returns after the copy: the tensors may change then. An empty list: this way is not open
        to these tensors (they are on a CPU, there is no room, …); nothing is held then.
        """
        ...

    async def serve(self) -> None:
        """Does the trainer's part until all workers that use this way have it; safe to cancel.

        Does not raise when it fails: those who wanted it this way take another one.
        """
        ...

    def call_off(self) -> None:
        """The workers get new commands, without this way: begin no more. Idempotent.

        What has begun goes on: a worker that has the bytes need not take them again.
        """
        ...

    async def close(self) -> None:
        """The publication has ended, well or not. Memory is kept for the next one. Idempotent."""
        ...

    def forget(self) -> None:
        """No version follows: give back all memory that no worker reads any more. Idempotent."""
        ...
