"""Searching a device's memory for infinity, NaN and zeros, without bringing it to the host."""

from typing import Any, cast

import torch

from rolloutbus.bus.weights.dtypes import DTYPES

_CHUNK = 1 << 26
"""Elements at once: few kernels, and little memory beside what is judged."""
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def judge_on_device(raw: torch.Tensor, dtype: str) -> tuple[int, bool]:
    """Of uint8 [whole elements]: numbers that are not finite, and whether every byte is 0."""
    n_wrong = 0
    floats = DTYPES[dtype].floats if dtype in DTYPES else None
    if floats is not None and len(raw):
        ones = floats.not_finite
        for bits in _parts(raw.view(_SIGNED[floats.size_bytes])):
            n_wrong += int(((bits & ones) == ones).sum())
    return n_wrong, not any(bool(part.any()) for part in _parts(raw))


def _parts(raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cast("Any", raw).split(_CHUNK)  # untyped
