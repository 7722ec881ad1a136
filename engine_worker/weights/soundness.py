"""Whether bytes can be weights: a diverged trainer's hold infinity, a lost gather's are zero.

Judged when a version is staged, so that such a version fails in prepare and is installed nowhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rolloutbus.bus.weights.dtypes import DTYPES
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

_CHUNK = 1 << 18
"""Elements whose masks stay in the cache."""


def n_not_finite(raw: Bytes, dtype: str) -> int:
    """Numbers in `raw`, uint8 [whole elements], that are infinite or NaN."""
    floats = DTYPES[dtype].floats if dtype in DTYPES else None
    if floats is None:
        return 0
    bits = np.ascontiguousarray(raw).view(f"u{floats.size_bytes}")
    mask = bits.dtype.type(floats.not_finite)
    found = 0
    for chunk in _chunks(bits):
        masked = chunk & mask
        if masked.max() == mask:  # hardly ever; and cheaper than counting
            found += int(np.count_nonzero(masked == mask))
    return found


def is_zero(raw: Bytes) -> bool:
    """Whether every byte is 0; quick where the first bytes are not."""
    return not any(chunk.any() for chunk in _chunks(raw))


def require_sound(
    tensors: Mapping[str, RawTensor],
    manifest: Iterable[Tensor],
    is_zero_now: Callable[[str], bool],
    *,
    allow_zeros: bool = False,
) -> None:
    """Judge a version that is about to be staged.

    Args:
        tensors: its raw bytes by name; what is on a device is judged there.
        manifest: what they are.
        is_zero_now: whether the active tensor of that name is all zero: then it may stay so.
        allow_zeros: any tensor may be all zero.

    Raises:
        EngineFailed: `bad_request`; `.field` names the tensor.
    """
    for tensor in manifest:
        raw = tensors[tensor.name]
        wrong, wiped = judge(raw, tensor.dtype)
        if wrong:
            raise _unsound(tensor.name, f"{wrong} of its numbers are infinite or NaN")
        if allow_zeros or not wiped or not tensor.size_bytes:
            continue
        if not is_zero_now(tensor.name):
            why = "it is all zero, and the active one is not; if it should be, allow_zeros=True"
            raise _unsound(tensor.name, why)


def judge(raw: RawTensor, dtype: str) -> tuple[int, bool]:
    """How many numbers are infinite or NaN, and whether every byte is 0."""
    if isinstance(raw, np.ndarray):
        return n_not_finite(raw, dtype), is_zero(raw)
    # Torch takes seconds to import, and host memory does without.
    from rolloutbus.engine_worker.weights.gpu_soundness import judge_on_device  # noqa: PLC0415

    return judge_on_device(raw, dtype)


def _chunks(bits: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(0, len(bits), _CHUNK):
        yield bits[start : start + _CHUNK]


def _unsound(tensor: str, why: str) -> EngineFailed:
    message = f"tensor {tensor!r}: {why}"
    return EngineFailed(Problem("bad_request", message, "failed", field=f"tensors.{tensor}"))
