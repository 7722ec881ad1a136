"""Copies are exact whatever the shape, stride and type, and what is wrong with them is found."""

import numpy as np
import pytest
import torch

from rolloutbus.bus.weights.manifest import Bytes, digest_of
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.messages.weights import Reserved
from rolloutbus.trainer_adapter.publisher.weight_writer import (
    PIECE_BYTES,
    Judgement,
    WeightWriter,
    put,
)

FLOATS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
N = PIECE_BYTES + 13
"""Elements: more than one piece of every type, and an odd rest."""


def copied(source: torch.Tensor, dtype: torch.dtype) -> tuple[Bytes, Judgement]:
    place = np.zeros(source.numel() * dtype.itemsize, np.uint8)
    return place, put(place, dtype, source)


def raw(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", ["flat", "turned", "scalar"])
def test_bytes_and_digest_are_those_of_the_tensor(
    dtype: torch.dtype, shape: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = {
        "flat": torch.randn(N, generator=generator),
        "turned": torch.randn(N // 7, 7, generator=generator).t(),
        "scalar": torch.tensor(1.5),
    }[shape].to(dtype)
    place, judged = copied(whole, dtype)
    assert np.array_equal(place, raw(whole))
    assert judged == Judgement(digest_of(raw(whole)), is_finite=True, is_zero=False)


def test_a_cast_is_made_on_the_way(seed: int) -> None:
    source = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    place, _ = copied(source, torch.bfloat16)
    assert np.array_equal(place, raw(source.bfloat16()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, N // 2, N - 1])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, at: int) -> None:
    source = torch.zeros(N)
    source[at] = float("nan")
    _, judged = copied(source.to(dtype), dtype)
    assert not judged.is_finite


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinity_is_found(value: float) -> None:
    _, judged = copied(torch.tensor([1.0, value]), torch.float32)
    assert not judged.is_finite


def test_the_largest_number_is_finite() -> None:
    largest = torch.finfo(torch.float64).max
    _, judged = copied(torch.tensor([largest, -largest], dtype=torch.float64), torch.float64)
    assert judged.is_finite


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_are_told_from_a_single_value(dtype: torch.dtype) -> None:
    source = torch.zeros(N)
    assert copied(source.to(dtype), dtype)[1].is_zero
    source[-1] = 1.0
    assert not copied(source.to(dtype), dtype)[1].is_zero


def test_nothing_is_said_of_zeros_that_are_integers_or_not_there() -> None:
    assert not copied(torch.zeros(4, dtype=torch.int32), torch.int32)[1].is_zero
    assert not copied(torch.zeros(0), torch.float32)[1].is_zero


def test_memory_of_the_store_that_cannot_be_used_is_told_and_its_bytes_are_pushed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = Reserved(1, host_id(), f"rolloutbus-{'0' * 16}-{'1' * 16}", 64)
    room = WeightWriter().room(gone, 64)
    assert (len(room.content), room.is_in_store) == (64, False)
    assert "its bytes are pushed" in caplog.text
