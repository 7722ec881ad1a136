"""Whether the tensors of a version are those that an engine expects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rolloutbus.bus.weights.dtypes import CASTABLE, DTYPES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

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
