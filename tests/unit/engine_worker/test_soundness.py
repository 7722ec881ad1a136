"""What a diverged trainer or a lost gather leaves in a version is found before it is installed."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.weights.manifest import DTYPES, Bytes, bytes_of, digest_of, lay_out, total_bytes
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.engine_worker.weights.checks import (
    is_zero,
    n_not_finite,
    require_sound,
    verify,
)


def raw(values: Any, dtype: Any) -> Bytes:  # noqa: ANN401 - whatever numpy takes
    return np.array(values, dtype).view(np.uint8)


def bf16(values: list[float]) -> Bytes:
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        ("F64", raw([1.0, INF, -INF, NAN, -1e300], np.float64)),
        ("F32", raw([1.0, INF, -INF, NAN, -3e38], np.float32)),
        ("C64", raw([complex(1.0, INF), complex(-INF, 0.0), complex(0.0, NAN)], np.complex64)),
        ("F16", raw([1.0, INF, -INF, NAN, -65504.0], np.float16)),
        ("BF16", bf16([1.0, INF, -INF, NAN, -3e38])),
        ("F8_E5M2", np.array([0x7C, 0xFC, 0x7F, 0x7B, 0x00], np.uint8)),
        ("F8_E4M3", np.array([0x7F, 0xFF, 0x7F, 0x7E, 0xFE], np.uint8)),
    ],
)
def test_infinity_and_nan_are_counted_in_every_type(dtype: str, content: Bytes) -> None:
    assert n_not_finite(content, dtype) == 3


@pytest.mark.parametrize("bad", [INF, -INF, NAN, -NAN])
@pytest.mark.parametrize("type_", [np.float64, np.float32, np.float16])
def test_one_bad_number_is_found_whatever_its_sign(
    bad: float, type_: type[np.floating[Any]]
) -> None:
    content = raw([-1.0, 1.0, bad], type_)
    assert n_not_finite(content, f"F{8 * np.dtype(type_).itemsize}") == 1


def test_integers_are_always_finite() -> None:
    assert n_not_finite(raw([-1, 0, 2**31 - 1], np.int32), "I32") == 0


@pytest.mark.parametrize("at", [0, 1 << 20, (1 << 21) + 5])
def test_one_bad_number_is_found_wherever_it_is(at: int) -> None:
    values = np.zeros((1 << 21) + 6, np.float32)
    assert is_zero(values.view(np.uint8))
    values[at] = NAN
    assert n_not_finite(values.view(np.uint8), "F32") == 1
    assert not is_zero(values.view(np.uint8))


def test_unaligned_bytes_are_judged_too() -> None:
    shifted = np.frombuffer(b"x" + raw([1.0, NAN], np.float32).tobytes(), np.uint8)[1:]
    assert n_not_finite(shifted, "F32") == 1


def judged(content: Bytes, *, was_zero: bool = False, allow_zeros: bool = False) -> None:
    manifest = lay_out([("w", "F32", (2,))])
    require_sound({"w": content}, manifest, lambda _: was_zero, allow_zeros=allow_zeros)


def test_the_tensor_that_is_not_sound_is_named() -> None:
    for content in (raw([1.0, INF], np.float32), raw([0.0, 0.0], np.float32)):
        with pytest.raises(EngineFailed) as caught:
            judged(content)
        assert (caught.value.code, caught.value.field) == ("bad_request", "tensors.w")


def test_zeros_may_follow_zeros() -> None:
    judged(raw([0.0, 0.0], np.float32), was_zero=True)
    judged(raw([0.0, 1.0], np.float32))


def test_zeros_that_are_meant_are_sound_and_infinity_is_not() -> None:
    with pytest.raises(EngineFailed, match="allow_zeros=True"):
        judged(raw([0.0, 0.0], np.float32))
    judged(raw([0.0, 0.0], np.float32), allow_zeros=True)
    with pytest.raises(EngineFailed, match="infinite or NaN"):
        judged(raw([0.0, INF], np.float32), allow_zeros=True)


def test_memory_of_a_device_is_judged_alike() -> None:
    torch = pytest.importorskip("torch")
    manifest = lay_out([("w", "BF16", (3,))])
    for values, is_sound in (([1.0, 0.0, -2.0], True), ([1.0, NAN, 0.0], False)):
        content = torch.tensor(values, dtype=torch.bfloat16).view(torch.uint8)
        if is_sound:
            require_sound({"w": content}, manifest, lambda _: False)
        else:
            with pytest.raises(EngineFailed):
                require_sound({"w": content}, manifest, lambda _: False)


TYPES = ["F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64", "I32", "U8"]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_device_finds_what_a_host_finds(dtype: str, seed: int) -> None:
    torch = pytest.importorskip("torch")
    from rolloutbus.engine_worker.weights.torch_tensors import judge_on_device  # noqa: PLC0415

    size_bytes = DTYPES[dtype].size_bytes
    random = np.random.default_rng(seed)
    wild = random.integers(0, 256, 4096 * size_bytes, np.uint8)  # finite or not by chance
    minus_zero = np.zeros(8 * size_bytes, np.uint8)
    minus_zero[-1] = 0x80
    contents = [wild, minus_zero, np.zeros(16, np.uint8), np.zeros(0, np.uint8)]

    found = judge_on_device([(torch.tensor(each), dtype) for each in contents])

    assert found == [(n_not_finite(each, dtype), is_zero(each)) for each in contents]


def published(n_elements: int, seed: int) -> tuple[Bytes, list[Tensor]]:
    """A version of tensors of several types, one of them all zero and one empty."""
    forms = [(dtype, dtype, (n_elements,)) for dtype in TYPES]
    tensors = lay_out([*forms, ("zero", "F32", (n_elements,)), ("empty", "F32", (0,))])
    content = np.random.default_rng(seed).integers(0, 256, total_bytes(tensors), np.uint8)
    bytes_of(content, tensors[-2])[:] = 0
    digests = [digest_of(bytes_of(content, each)) for each in tensors]
    return content, [
        msgspec.structs.replace(each, digest=digest)
        for each, digest in zip(tensors, digests, strict=True)
    ]


async def test_one_reading_verifies_and_judges_alike(seed: int) -> None:
    content, tensors = published(700_001, seed)  # of several pieces, the last one smaller

    checks = await verify(content, tensors)

    for tensor in tensors:
        raw, found = bytes_of(content, tensor), checks[tensor.name]
        expected = (n_not_finite(raw, tensor.dtype), is_zero(raw))
        assert (found.n_not_finite, found.is_zero) == expected, tensor.name


async def test_what_a_reading_has_found_is_not_read_again() -> None:
    content = raw([1.0, NAN], np.float32)
    manifest = [
        msgspec.structs.replace(lay_out([("w", "F32", (2,))])[0], digest=digest_of(content))
    ]
    checks = await verify(content, manifest)
    content[:] = raw([1.0, 2.0], np.float32)

    with pytest.raises(EngineFailed, match="infinite or NaN") as caught:
        require_sound({"w": content}, manifest, lambda _: False, checks=checks)
    assert caught.value.field == "tensors.w"


async def test_the_first_tensor_that_arrived_changed_is_named(seed: int) -> None:
    content, tensors = published(700_001, seed)
    for tensor in tensors[3:5]:
        bytes_of(content, tensor)[-1] ^= 1

    with pytest.raises(EngineFailed) as caught:
        await verify(content, tensors)

    assert (caught.value.code, caught.value.field) == ("digest_mismatch", f"tensors.{TYPES[3]}")
