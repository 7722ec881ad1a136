"""Tensors cut into ranges: everything once, in order, and never more than was allowed."""

from rolloutbus.engine_worker.engine import TensorRange, TensorSpec
from rolloutbus.engine_worker.weights.active import in_batches


def spec(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (size_bytes,), size_bytes)


def test_a_large_tensor_is_cut_and_small_ones_come_together() -> None:
    specs = [spec("a", 3), spec("empty", 0), spec("b", 4), spec("large", 25), spec("c", 5)]
    assert list(in_batches(specs, 10)) == [
        [TensorRange("a", 0, 3), TensorRange("b", 0, 4)],
        [TensorRange("large", 0, 10)],
        [TensorRange("large", 10, 10)],
        [TensorRange("large", 20, 5), TensorRange("c", 0, 5)],
    ]


def test_nothing_makes_no_batch() -> None:
    assert list(in_batches([], 10)) == []
