"""Checks of a version: its tensors fit the engine, its bytes are as published, and can be weights.

A diverged trainer's weights hold infinity, those of a lost gather are zero: such a version fails
when it is staged, and is installed nowhere.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
import xxhash

from rolloutbus.bus.weights.manifest import CASTABLE, DTYPES, Bytes, bytes_of
from rolloutbus.bus.weights.side_by_side import n_threads, side_by_side
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor, TensorCheck
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

_PIECE_BYTES = 1 << 20
"""Read three times: once from memory, which an engine's steps read beside it, then from a cache."""
_MAX_READERS = 4
"""Eight are no faster and take more cores: likely they wait for the interpreter between pieces."""


class TensorSum:
    """Digest and checks of a tensor of which the pieces come in order."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._hasher = xxhash.xxh3_64()
        self._n_not_finite = 0
        self._is_zero = True

    def add(self, piece: Bytes) -> None:
        """Add the next piece, uint8 [whole elements]."""
        self._hasher.update(piece.data)
        self._n_not_finite += n_not_finite(piece, self._dtype)
        self._is_zero = self._is_zero and is_zero(piece)

    def of(self, name: str) -> TensorCheck:
        """What was found in the pieces so far."""
        return TensorCheck(name, self._hasher.intdigest(), self._n_not_finite, self._is_zero)


async def verify(content: Bytes, tensors: Sequence[Tensor]) -> Mapping[str, TensorCheck]:
    """Compare digests, in threads; returns by name what that one reading has found.

    Raises:
        EngineFailed: `digest_mismatch`; `.field` names the first wrong tensor.
    """
    return await asyncio.to_thread(_verified, content, tensors)


def _verified(content: Bytes, tensors: Sequence[Tensor]) -> Mapping[str, TensorCheck]:
    def read(tensor: Tensor) -> TensorCheck:
        raw, found = bytes_of(content, tensor), TensorSum(tensor.dtype)
        for start in range(0, len(raw), _PIECE_BYTES):
            found.add(raw[start : start + _PIECE_BYTES])
        return found.of(tensor.name)

    checks: dict[str, TensorCheck] = {}
    size_bytes = sum(each.size_bytes for each in tensors)
    n_readers = min(n_threads(), _MAX_READERS)
    with closing(side_by_side(read, tensors, size_bytes, n=n_readers)) as reading:
        for tensor, check in zip(tensors, reading, strict=True):
            if check.digest != tensor.digest:
                raise wrong_bytes(tensor.name)
            checks[tensor.name] = check
    return checks


def wrong_bytes(tensor: str) -> EngineFailed:
    """Builds the error for a tensor that arrived changed."""
    message = f"tensor {tensor!r} did not arrive as it was published"
    problem = Problem("digest_mismatch", message, "failed", field=f"tensors.{tensor}")
    return EngineFailed(problem)


Given = TypeVar("Given")
Specs = Mapping[str, TensorSpec]

MAX_NAMED = 8
"""Wrong tensors that a message lists."""


def misfit(specs: Specs, tensors: Sequence[Tensor]) -> Problem | None:
    """Why an engine cannot take the tensors of a manifest; None if it can."""
    wrong = [*_wrong(specs, {each.name: each for each in tensors}, _other_type)]
    if not wrong:
        return None
    return Problem("bad_request", _listed(wrong), "not_started", field=f"tensors.{wrong[0][0]}")


def require_bytes(specs: Specs, tensors: Mapping[str, RawTensor]) -> None:
    """Check the sizes of raw tensors.

    Raises:
        ValueError: they do not fit, by name.
    """
    wrong = [*_wrong(specs, tensors, _other_size)]
    if wrong:
        raise ValueError(f"weights do not fit the model: {_listed(wrong)}")


def _wrong(
    specs: Specs, given: Mapping[str, Given], differs: Callable[[TensorSpec, Given], str]
) -> Iterator[tuple[str, str]]:
    """(name, why) of each tensor that is wrong."""
    for name, each in given.items():
        spec = specs.get(name)
        why = "the engine has no such tensor" if spec is None else differs(spec, each)
        if why:
            yield name, why
    for name in specs:
        if name not in given:
            yield name, "it is missing"


def _listed(wrong: Sequence[tuple[str, str]]) -> str:
    shown = "; ".join(f"tensor {name!r}: {why}" for name, why in wrong[:MAX_NAMED])
    return shown + (f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else "")


def _other_size(spec: TensorSpec, raw: RawTensor) -> str:
    if raw.nbytes == spec.size_bytes:
        return ""
    return f"{raw.nbytes} bytes, but {spec.dtype} {list(spec.shape)} has {spec.size_bytes}"


def _other_type(spec: TensorSpec, tensor: Tensor) -> str:
    if (spec.dtype, spec.shape) == (tensor.dtype, tensor.shape):
        return ""
    why = (
        f"published as {tensor.dtype} {list(tensor.shape)}, the engine has "
        f"{spec.dtype} {list(spec.shape)}"
    )
    if spec.shape == tensor.shape and {spec.dtype, tensor.dtype} <= {*CASTABLE}:
        why += f"; cast it with WeightPublisher(dtype=torch.{DTYPES[spec.dtype].torch})"
    return why


_CHUNK_BYTES = 4 << 20
"""Read twice out of the cache. Between two calls a thread waits for the interpreter, so that much
smaller ones take longer, with many threads."""


def n_not_finite(raw: Bytes, dtype: str) -> int:
    """Numbers in `raw`, uint8 [whole elements], that are infinite or NaN."""
    floats = DTYPES[dtype].floats if dtype in DTYPES else None
    if floats is None:
        return 0
    bits = np.ascontiguousarray(raw).view(f"u{floats.size_bytes}")
    mask = bits.dtype.type(floats.not_finite)
    sign = 1 << (8 * floats.size_bytes - 1)
    found = 0
    for chunk in _chunks(bits):
        # The largest of either sign tells, and needs no memory beside what is read.
        is_positive = chunk.view(f"i{floats.size_bytes}").max() >= floats.not_finite
        if is_positive or chunk.max() >= sign + floats.not_finite:  # hardly ever
            found += int(np.count_nonzero(chunk & mask == mask))
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
    checks: Mapping[str, TensorCheck] | None = None,
) -> None:
    """Judge a version that is about to be staged.

    Args:
        tensors: its raw bytes by name; what is on a device is judged there.
        manifest: what they are.
        checks: by name, what is known of some of them; these are not read again.
        is_zero_now: whether the active tensor of that name is all zero: then it may stay so.
        allow_zeros: any tensor may be all zero.

    Raises:
        EngineFailed: `bad_request`; `.field` names the tensor.
    """
    for tensor, (wrong, wiped) in _judged(tensors, [*manifest], checks or {}):
        if wrong:
            raise _unsound(tensor.name, f"{wrong} of its numbers are infinite or NaN")
        if allow_zeros or not wiped or not tensor.size_bytes:
            continue
        if not is_zero_now(tensor.name):
            why = "it is all zero, and the active one is not; if it should be, allow_zeros=True"
            raise _unsound(tensor.name, why)


def _judged(
    tensors: Mapping[str, RawTensor],
    manifest: Sequence[Tensor],
    checks: Mapping[str, TensorCheck],
) -> Iterator[tuple[Tensor, tuple[int, bool]]]:
    """For each tensor: how many numbers are infinite or NaN, and whether every byte is 0."""
    found = {name: (each.n_not_finite, each.is_zero) for name, each in checks.items()}
    on_device = {
        each.name: (raw, each.dtype)
        for each in manifest
        if each.name not in found and not isinstance(raw := tensors[each.name], np.ndarray)
    }
    if on_device:
        # Torch takes seconds to import, and host memory does without.
        from rolloutbus.engine_worker.weights.torch_tensors import judge_on_device  # noqa: PLC0415

        verdicts = judge_on_device([*on_device.values()])
        found |= zip(on_device, verdicts, strict=True)

    def judge(tensor: Tensor) -> tuple[int, bool]:
        raw = tensors[tensor.name]
        if tensor.name not in found and isinstance(raw, np.ndarray):
            return n_not_finite(raw, tensor.dtype), is_zero(raw)
        return found[tensor.name]

    n_bytes = sum(each.size_bytes for each in manifest if each.name not in found)
    return zip(manifest, side_by_side(judge, manifest, n_bytes), strict=True)


def _chunks(bits: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    n = _CHUNK_BYTES // bits.itemsize
    for start in range(0, len(bits), n):
        yield bits[start : start + n]


def _unsound(tensor: str, why: str) -> EngineFailed:
    message = f"tensor {tensor!r}: {why}"
    return EngineFailed(Problem("bad_request", message, "failed", field=f"tensors.{tensor}"))
