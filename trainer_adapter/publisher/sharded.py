"""Tensors that lie on several ranks, gathered to rank 0 bucket by bucket as they are published.

Every rank has one, and all go through a publication together:

shards = ShardedSource(model)                     # every rank, once: the model is sharded
...
if rank == 0:
    published = publisher.publish(shards)         # rank 0 alone has a client
else:
    shards.assist()                               # the others gather with it
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
import torch.distributed as dist

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.codec import runs_within
from rolloutbus.bus.wire.errors import LocalProtocolError, PeerLost, RequestCancelled, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    QueuedWork,
    Rename,
    Sharded,
    SourceTensor,
    Tensors,
    are_held,
    is_sharded,
    named_tensors,
    published_dtype,
    require_castable,
)

Merge = Callable[[str, Sequence[torch.Tensor]], torch.Tensor]
"""(name, the parts of several ranks, by rank) -> the whole. Also called with tensors on the device
`meta`, to find out its shape: so it only joins, turns and picks."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one rank, as this rank describes it to the other ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole of it that this rank can gather or has."""
    leads: bool
    """Whether this rank is the first of the ranks that gather it together, and speaks for them."""


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


BUCKET_BYTES = 256 << 20
ROOT = 0
_BUCKET, _END, _GIVEN_UP = 1, 2, 3


@strict()
class ShardedSource:
    """What the ranks of a group hold together, as one list of tensors.

    DTensors (FSDP2, tensor parallel plans) are gathered on their own meshes. Plain tensors are
    taken from the first rank that has the name, so that pipeline stages add up; with `merge`, from
    all that have it. No rank ever holds more than two buckets of what is gathered.

    `publish` on rank 0 and `assist` on the others go together: both run collective operations, so
    nothing else may use the group or the meshes until they, or the handle's `copied`, return.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        group: dist.ProcessGroup | None = None,
        rename: Rename | None = None,
        merge: Merge | None = None,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Tell all ranks what this one holds; every rank of the group makes one, together.

        Args:
            tensors: as of `WeightPublisher.publish`. They are remembered: make another one when
                parameters become other objects, not when their values change.
            group: the ranks; None: all.
            rename: the engine's name for this rank's; None for what is not published. Without it
                names lose what wrappers put into them, as in `WeightPublisher`.
            merge: makes one tensor of the parts that several ranks have under one name.
            dtype: what floating-point tensors are cast to before they are gathered.
            bucket_bytes: gathered at once; more if one tensor is larger.

        Raises:
            SettingsError: as `named_tensors`, the tensors come out of an iterator, or they cannot
                be published as `dtype`.
        """
        require_castable(dtype)
        if not are_held(tensors):
            raise SettingsError(
                "a ShardedSource remembers its tensors: give it the module, a dict or a list, not "
                "an iterator, whose tensors may be gone when the next one is asked for"
            )
        self._named = dict(named_tensors(tensors, rename, may_be_empty=True))
        self._group = group
        self._merge = merge
        self._dtype = dtype
        self._rank = dist.get_rank(group)
        self._device = _device_of(list(self._named.values()), group)
        mine = [self._holding(name, each) for name, each in self._named.items()]
        plan = plan_of(exchange(mine, group, self._device), merge)
        self._buckets = runs_within(bucket_bytes, plan, lambda each: size_of(each.whole))
        self._lock = threading.Lock()
        self._n_settled = 0
        """Versions of which the other ranks have heard the end."""
        self._n_given_up = 0
        self._queued: list[QueuedWork] = []
        """That the next version waits for."""
        self.held: Sequence[torch.Tensor] = ()
        """Empty: the tensors lie on several ranks."""
        self.tensors = [each.whole for each in plan]
        self.peak_bytes = 0
        """The most that was gathered and held at once on this rank, padding left out."""

    def assist(self) -> None:
        """Take part while rank 0 publishes; afterwards the parameters may change.

        Raises:
            RequestCancelled: rank 0 gave up before it had everything.
            PeerLost: another rank is gone, or did not come in the group's time.
        """
        if self._rank == ROOT:
            raise LocalProtocolError("rank 0 publishes; the others assist")
        waiting = iter(self._buckets)
        while (word := self._receive_word()) == _BUCKET:
            self._gather(next(waiting))
        if word == _GIVEN_UP:
            problem = Problem("cancelled", "rank 0 gave the publication up", "not_started")
            raise RequestCancelled(problem)

    def note_work(self) -> None:
        """Rank 0: the next version waits for what this thread has asked of its GPU by now."""
        self._queued.append(QueuedWork(self._named.values()))

    def wait_written(self) -> None:
        """See `TensorSource`; nothing is held."""
        while self._queued:
            self._queued.pop().wait()

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """Rank 0: all tensors in their order; a bucket's are gone when the next is asked for."""
        if self._rank != ROOT:
            raise LocalProtocolError("only rank 0 publishes; the others assist")
        self.wait_written()
        with self._lock:
            for bucket in self._buckets:
                self._send_word(_BUCKET)
                yield self._gather(bucket)
            self._n_settled += 1
            self._send_word(_END)

    def give_up(self) -> None:
        """Rank 0: let the others go, if they still wait for buckets of this version."""
        with self._lock:
            self._n_given_up += 1
            if self._n_given_up > self._n_settled:
                self._n_settled += 1
                # Where a rank is gone the others find out by themselves.
                with contextlib.suppress(PeerLost):
                    self._send_word(_GIVEN_UP)

    @torch.no_grad()
    def _gather(self, bucket: Sequence[Gathered]) -> list[torch.Tensor]:
        """The tensors of one bucket; on other ranks than 0 nothing. Collective."""
        whole: list[torch.Tensor] = []
        n_bytes = 0
        for each in bucket:
            with _others_present():
                parts = self._collected(each, self._value(each))
            n_bytes += size_of(each.whole)
            self.peak_bytes = max(self.peak_bytes, n_bytes)
            if self._rank != ROOT:
                n_bytes = 0
            elif self._merge is not None and len(parts) > 1:
                whole.append(self._merge(each.name, parts))
            else:
                whole.append(parts[0])
        return whole

    def _collected(self, each: Gathered, value: torch.Tensor | None) -> list[torch.Tensor]:
        """Rank 0: what the owners have."""
        parts: list[torch.Tensor] = []
        for owner, part in zip(each.owners, each.parts, strict=True):
            if owner == self._rank:
                assert value is not None
                if self._rank != ROOT:
                    dist.send(value.contiguous(), group=self._group, group_dst=ROOT)
                else:
                    parts.append(value)
            elif self._rank == ROOT:
                received = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                dist.recv(received, group=self._group, group_src=owner)
                parts.append(received)
        return parts

    def _value(self, each: Gathered) -> torch.Tensor | None:
        """The whole of what this rank holds, gathered on its mesh. Collective there."""
        tensor = self._named.get(each.name)
        if tensor is None or not (is_sharded(tensor) or self._rank in each.owners):
            return None
        tensor = tensor.to(published_dtype(tensor.dtype, self._dtype))
        return cast("Sharded", tensor).full_tensor() if is_sharded(tensor) else tensor

    def _holding(self, name: str, tensor: torch.Tensor) -> Holding:
        dtype = DTYPE_NAMES[published_dtype(tensor.dtype, self._dtype)]
        return Holding(name, dtype, tuple(tensor.shape), leads=_leads(tensor))

    def _send_word(self, word: int) -> None:
        with _others_present():
            sent = torch.tensor([word], device=self._device)
            dist.broadcast(sent, group=self._group, group_src=ROOT)

    def _receive_word(self) -> int:
        word = torch.zeros(1, dtype=torch.int64, device=self._device)
        with _others_present():
            dist.broadcast(word, group=self._group, group_src=ROOT)
        return int(word.item())


@contextlib.contextmanager
def _others_present() -> Generator[None]:
    """Converts a failure of the process group into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"the ranks did not come together: {error}", outcome="not_started"
        ) from error


def _leads(tensor: torch.Tensor) -> bool:
    """Whether this rank speaks for those that gather the tensor with it."""
    if not is_sharded(tensor):
        return True
    return dist.get_rank() == int(cast("Sharded", tensor).device_mesh.mesh.flatten()[0])


def _device_of(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Where this rank's part of the conversation lies."""
    if tensors:
        return tensors[0].device
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
