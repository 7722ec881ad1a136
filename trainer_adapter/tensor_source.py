"""What a publisher reads tensors from: a list of them, given out in buckets."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch

from trainer_adapter.named_tensors import Rename, Tensors, named_tensors, require_whole


class SourceTensor(NamedTuple):
    """One tensor that will be given out."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a version; the same ones, with other values, of the next.

    For each version `buckets` is called at most once, and then `give_up` once, both in a thread.
    """

    @property
    def tensors(self) -> Sequence[SourceTensor]:
        """What will be given out, in this order."""
        ...

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """All of them if they are all at hand, in this order; else nothing."""
        ...

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All tensors in their order; a bucket's may be gone when the next is asked for."""
        ...

    def give_up(self) -> None:
        """No bucket of this version will be asked for any more."""
        ...


class HeldTensors:
    """Tensors that the trainer has as they are, in one bucket."""

    def __init__(self, tensors: Tensors, rename: Rename | None = None) -> None:
        """Takes note of them at once, and of the work on their GPU that they wait for.

        Raises:
            SettingsError: as `named_tensors`, or one is a shard.
        """
        named = named_tensors(tensors, rename)
        require_whole(named)
        self.held = [tensor for _, tensor in named]
        self.tensors = [SourceTensor(name, each.dtype, tuple(each.shape)) for name, each in named]
        devices = {each.device for each in self.held if each.is_cuda}
        self._written = [torch.cuda.current_stream(each).record_event() for each in devices]

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All of them, once the GPU has written them."""
        for event in self._written:
            event.synchronize()
        yield self.held

    def give_up(self) -> None:
        """Nobody else waits."""
