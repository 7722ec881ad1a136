"""Which rank holds what of a sharded model, and in which order it is gathered: on all ranks alike.

Ranks tell one another what they hold, once; each then draws the same plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from rolloutbus.bus.packing import runs_within
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.publisher.named_tensors import TORCH_DTYPES
from rolloutbus.trainer_adapter.publisher.tensor_source import SourceTensor

Merge = Callable[[str, Sequence[torch.Tensor]], torch.Tensor]
"""(name, the parts of several ranks, by rank) -> the whole. Also called with tensors on the device
`meta`, to find out its shape: so it only joins, turns and picks."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one rank, as the others are told."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole of it that this rank can gather or has."""
    leads: bool
    """Of the ranks that gather it together this is the first; it speaks for them."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """How one tensor comes to rank 0."""

    name: str
    owners: tuple[int, ...]
    """Ranks whose whole or part is taken."""
    parts: tuple[SourceTensor, ...]
    """What each owner has."""
    whole: SourceTensor


def plan_of(holdings: Sequence[Sequence[Holding]], merge: Merge | None) -> list[Gathered]:
    """All tensors of all ranks, in the order of the ranks that have them first.

    Without `merge` a name that several ranks have stands for copies: the first is taken.

    Raises:
        SettingsError: there is none, or `merge` failed.
    """
    ranks_by_name: dict[str, dict[int, Holding]] = {}
    for rank, held in enumerate(holdings):
        for each in held:
            ranks_by_name.setdefault(each.name, {})[rank] = each
    if not ranks_by_name:
        raise SettingsError("there are no tensors to publish")
    return [_gathered(name, by_rank, merge) for name, by_rank in ranks_by_name.items()]


def in_buckets(plan: Sequence[Gathered], bucket_bytes: int) -> list[list[Gathered]]:
    """Runs of tensors of at most `bucket_bytes` each; a larger tensor is alone in its own."""
    return runs_within(bucket_bytes, plan, lambda each: size_of(each.whole))


def size_of(tensor: SourceTensor) -> int:
    """Of its values, bytes."""
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def exchange(
    mine: Sequence[Holding], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[Holding]]:
    """Tell all ranks what this one holds; what each of them does, by rank. Collective."""
    raw = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8).to(device)
    size = torch.tensor([len(raw)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group)  # type: ignore[reportUnknownMemberType]
    longest = int(max(each.item() for each in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(raw)] = raw
    received = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group)  # type: ignore[reportUnknownMemberType]
    decoder = msgspec.msgpack.Decoder(list[Holding])
    return [
        decoder.decode(each[: int(n.item())].cpu().numpy().tobytes())
        for each, n in zip(received, sizes, strict=True)
    ]


def _gathered(name: str, by_rank: dict[int, Holding], merge: Merge | None) -> Gathered:
    owners = tuple(sorted(rank for rank, each in by_rank.items() if each.leads))
    if merge is None:
        owners = owners[:1]
    parts = tuple(
        SourceTensor(name, TORCH_DTYPES[by_rank[rank].dtype], tuple(by_rank[rank].shape))
        for rank in owners
    )
    whole = parts[0]
    if merge is not None and len(parts) > 1:
        empty = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in parts]
        merged = merge(name, empty)
        whole = SourceTensor(name, merged.dtype, tuple(merged.shape))
    return Gathered(name, owners, parts, whole)
