"""A model's parameters are read back under the names and in the layout of its checkpoint."""

# pyright: reportUnknownMemberType=false
# torch leaves parameters untyped.

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from rolloutbus.engine_worker.engines.sglang.inside.checkpoint_map import CheckpointMap
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import CheckpointTensor, TensorRows

N_RANKS = 2
SHAPES = {
    "q.weight": (8, 6),
    "k.weight": (4, 6),
    "o.weight": (6, 8),
    "norm.weight": (6,),
    "scale": (),
    "stacked.weight": (3, 4, 6),
}
TENSORS = [CheckpointTensor(name, "F32", shape) for name, shape in SHAPES.items()]
WHOLE = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    for name, shape in SHAPES.items()
}


class Shard(torch.nn.Module):
    """One rank's part: `q` and `k` fused and split by rows, `o` split by columns."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.full((6, 6), 9.0))
        self.o = torch.nn.Parameter(torch.full((6, 4), 9.0))
        self.norm = torch.nn.Parameter(torch.full((6,), 9.0))
        self.scale = torch.nn.Parameter(torch.tensor(9.0))
        self.stacked = torch.nn.Parameter(torch.full((3, 2, 6), 9.0))
        self.lost = torch.nn.Parameter(torch.full((2,), 9.0))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's models do: a slice of each tensor is copied to a slice of a parameter."""
        rank = self.rank
        for name, tensor in weights:
            match name:
                case "q.weight":
                    self.qk.data[:4].copy_(tensor.narrow(0, 4 * rank, 4))
                case "k.weight":
                    self.qk.data[4:].copy_(tensor[2 * rank : 2 * rank + 2])
                case "o.weight":
                    self.o.data.copy_(tensor.narrow(1, 4 * rank, 4))
                case "norm.weight":
                    self.norm.data.copy_(tensor)
                case "scale":
                    self.scale.data.copy_(tensor)
                case _:
                    self.stacked.data.copy_(tensor[:, 2 * rank : 2 * rank + 2])


def shards() -> list[tuple[Shard, CheckpointMap]]:
    """Maps are made before the weights are there."""
    found: list[tuple[Shard, CheckpointMap]] = []
    for rank in range(N_RANKS):
        shard = Shard(rank)
        found.append((shard, CheckpointMap(shard, TENSORS)))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_what_ranks_hold_between_them_is_the_tensor(name: str) -> None:
    whole = WHOLE[name].reshape(SHAPES[name] or (1,))
    parts = shards()
    for shard, _ in parts:
        shard.load_weights(iter(WHOLE.items()))
    for first, stop in product(range(len(whole)), range(1, len(whole) + 1)):
        if first >= stop:
            continue
        raw = torch.zeros(whole[first:stop].nbytes + 8, dtype=torch.uint8)
        for _, held in parts:
            held.read(TensorRows(name, first, stop - first, 0), raw[4:-4])
        assert raw[4:-4].view(torch.float32).tolist() == whole[first:stop].flatten().tolist()
        assert raw[:4].tolist() == raw[-4:].tolist() == [0] * 4


def test_finding_out_writes_nothing() -> None:
    for shard, _ in shards():
        for parameter in shard.parameters():
            assert (parameter == 9.0).all()


def test_the_type_is_that_of_the_parameter() -> None:
    shard = Shard(0)
    shard.o.data = shard.o.data.bfloat16()
    held = CheckpointMap(shard, TENSORS)
    assert (held.dtype("o.weight"), held.dtype("norm.weight")) == ("BF16", "F32")


def test_what_nothing_fills_is_named() -> None:
    [(_, held), _] = shards()
    assert held.unfilled == ["lost"]


def test_a_tensor_that_the_model_passes_over_has_no_type() -> None:
    class Picky(Shard):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(each for each in weights if each[0] != "norm.weight")

    held = CheckpointMap(Picky(0), TENSORS)
    assert held.dtype("norm.weight") == ""
    assert not held.sources("norm.weight")


def test_what_is_computed_on_its_way_is_no_copy() -> None:
    class Transposing(Shard):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            named = dict(weights)
            self.norm.data.copy_(named["norm.weight"] * 2)

    held = CheckpointMap(Transposing(0), TENSORS)
    assert not held.sources("norm.weight")
    assert "norm" not in held.unfilled
