"""One table says what each type of a tensor is, in every library's terms."""

import numpy as np
import torch

from rolloutbus.bus.weights.manifest import CASTABLE, DTYPES


def test_sizes_are_those_of_the_libraries_that_have_the_type() -> None:
    for name, each in DTYPES.items():
        if each.numpy:
            assert np.dtype(each.numpy).itemsize == each.size_bytes, name
        if each.torch:
            assert getattr(torch, each.torch).itemsize == each.size_bytes, name


def test_infinity_and_nan_have_all_the_bits_and_the_largest_number_has_not() -> None:
    for name, each in DTYPES.items():
        if each.floats is None or not each.torch:
            continue
        dtype: torch.dtype = getattr(torch, each.torch)
        numbers = [float("nan"), torch.finfo(dtype).max]
        if name != "F8_E4M3":  # which has no infinity
            numbers += [float("inf"), -float("inf")]
        raw = torch.tensor(numbers, dtype=torch.float64).to(dtype).view(torch.uint8).numpy()
        parts = raw.view(f"u{each.floats.size_bytes}")[:: each.size_bytes // each.floats.size_bytes]
        ones = [int(part) & each.floats.not_finite == each.floats.not_finite for part in parts]
        assert ones == [True, False, True, True][: len(numbers)], name


def test_a_type_is_floating_point_here_if_it_is_in_torch() -> None:
    for name, each in DTYPES.items():
        if each.torch:
            dtype: torch.dtype = getattr(torch, each.torch)
            assert (each.floats is not None) == (dtype.is_floating_point or dtype.is_complex), name
    assert all(DTYPES[name].floats for name in CASTABLE)
