"""Arrays cross the wire with their type, shape and values."""

import math

import numpy as np
import pytest

from rolloutbus.bus.wire.codec import AnyArray, array_of, numpy_of
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.generation import Array


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(3, 4), (12,), (0, 4), (2, 3, 2)])
def test_an_array_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    values: AnyArray = np.arange(math.prod(shape)).astype(np.dtype(dtype)).reshape(shape)
    array = array_of(values)
    assert (array.dtype, array.shape) == (dtype, shape)
    back = numpy_of(array)
    assert back.dtype == dtype
    assert np.array_equal(back, values)
    assert not back.flags.writeable


def test_layout_and_byte_order_do_not_matter() -> None:
    values = np.arange(6, dtype=">f4").reshape(2, 3).T
    assert np.array_equal(numpy_of(array_of(values)), values)


def test_bfloat16_goes_as_its_bits_and_comes_as_float32() -> None:
    bits = np.array([[0x3F80, 0xC000], [0x7F80, 0x0000]], np.uint16)
    array = array_of(bits, "bfloat16")
    assert (array.dtype, len(array.data)) == ("bfloat16", 8)
    back = numpy_of(array)
    assert back.dtype == np.float32
    assert back.tolist() == [[1.0, -2.0], [np.inf, 0.0]]


@pytest.mark.parametrize("values", [np.zeros(2, np.complex64), np.zeros(2, np.float64)])
def test_a_type_that_the_bus_does_not_know_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=values.dtype.name):
        array_of(values)


def test_what_is_too_large_for_one_array_is_refused() -> None:
    with pytest.raises(ValueError, match=str(MAX_PIECE_BYTES)):
        array_of(np.zeros(MAX_PIECE_BYTES + 1, np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (2, 2), bytes(15)),
        Array("int32", (2,), bytes(12)),
        Array("uint8", (-1, -4), bytes(4)),
        Array("int64", (2**62, 4), b""),
    ],
)
def test_bytes_that_do_not_fill_the_shape_are_malformed(array: Array) -> None:
    with pytest.raises(RemoteProtocolError, match="bytes"):
        numpy_of(array)
