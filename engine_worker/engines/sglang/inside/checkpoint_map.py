"""Which part of a model's parameters each tensor of its checkpoint is copied to.

Models fuse and split what their checkpoints hold, each in its own `load_weights`. That method is
run once on tensors without content while its copies are watched and not done: so what was fused
can be read back, on each rank the part that it holds.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rolloutbus.engine_worker.engines.sglang.schedulers.wire import CheckpointTensor, TensorRows
from rolloutbus.engine_worker.engines.sglang.upstream.types import Model
from rolloutbus.engine_worker.weights.torch_tensors import DTYPE_NAMES, TORCH_TYPES

_aten = cast("Any", torch.ops).aten  # untyped
_WRITES = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
)


class FlatSpan(NamedTuple):
    """Elements of a flat tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Copy(NamedTuple):
    """Elements of a checkpoint's tensor, and the parameter's elements that they become."""

    source: FlatSpan
    parameter: str
    target: FlatSpan


class CheckpointMap:
    """Reads a model's parameters under the names and in the layout of its checkpoint."""

    def __init__(self, model: Model, tensors: Sequence[CheckpointTensor]) -> None:
        """Watch the model load these tensors; raises what its own code raises."""
        self._parameters = dict(model.named_parameters())
        self._shapes = {each.name: each.shape or (1,) for each in tensors}
        probes = [_probe(each) for each in tensors]
        watch = _Watch(dict(probes), self._parameters)
        with watch:
            model.load_weights(iter(probes))
        self._copies: Mapping[str, Sequence[Copy]] = watch.copies
        self._written = frozenset(watch.written)

    def dtype(self, name: str) -> str:
        """What the model keeps of the tensor, by safetensors name; empty: nothing."""
        copies = self._copies.get(name)
        return DTYPE_NAMES.get(self._parameter(copies[0].parameter).dtype, "") if copies else ""

    def sources(self, name: str) -> set[FlatSpan]:
        """Elements of the tensor that this rank holds whole rows or columns of."""
        row = _row_elements(self._shapes[name])
        return {each.source for each in self._copies.get(name, ()) if each.source.stride[0] == row}

    @property
    def unfilled(self) -> list[str]:
        """Parameters that the model's loading writes nothing to."""
        return [name for name in self._parameters if name not in self._written]

    def read(self, rows: TensorRows, into: torch.Tensor) -> None:
        """Write this rank's part of some rows into `into`, uint8 [bytes of the rows]."""
        row = _row_elements(self._shapes[rows.name])
        for source, name, target in self._copies.get(rows.name, ()):
            first_row, within = divmod(source.offset, row)
            start = max(first_row, rows.first)
            stop = min(first_row + source.shape[0], rows.first + rows.n)
            if start >= stop:
                continue
            held = self._parameter(name)
            part = held.as_strided(
                (stop - start, *target.shape[1:]),
                target.stride,
                target.offset + (start - first_row) * target.stride[0],
            )
            room = into.view(held.dtype)
            offset = int(room.storage_offset()) + (start - rows.first) * row + within
            room.as_strided((stop - start, *source.shape[1:]), source.stride, offset).copy_(part)

    def _parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name].data


def _row_elements(shape: tuple[int, ...]) -> int:
    return prod(shape[1:])


def _probe(tensor: CheckpointTensor) -> tuple[str, torch.Tensor]:
    """A tensor without content."""
    dtype = TORCH_TYPES[tensor.dtype]
    return tensor.name, torch.empty(tensor.shape, dtype=dtype, device="meta")


class _Watch(TorchDispatchMode):
    """Notes what is copied from `probes` to `parameters`; nothing is written meanwhile."""

    def __init__(
        self, probes: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        cast("Any", super()).__init__()  # untyped
        self.copies: dict[str, list[Copy]] = {}
        self.written: set[str] = set()
        """Parameters, whatever was written."""
        self._probes = {_memory(each): name for name, each in probes.items()}
        self._parameters = {_memory(each): name for name, each in parameters.items()}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Called for each operation below PyTorch's own views and gradients."""
        del types
        if func not in _WRITES or args[0].device.type == "meta":
            return func(*args, **(kwargs or {}))
        parameter = self._parameters.get(_memory(args[0]))
        if parameter is not None:
            self.written.add(parameter)
            if func is _aten.copy_.default:
                self._note(args[1], parameter, args[0])
        return args[0]

    def _note(self, source: torch.Tensor, parameter: str, target: torch.Tensor) -> None:
        name = self._probes.get(_memory(source))
        if name is not None and source.shape == target.shape:
            copy = Copy(_span(source), parameter, _span(target))
            self.copies.setdefault(name, []).append(copy)


def _span(tensor: torch.Tensor) -> FlatSpan:
    if not tensor.dim():
        return FlatSpan((1,), (1,), int(tensor.storage_offset()))
    return FlatSpan(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _memory(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor and of its views from that of others."""
    storage = cast("Any", tensor.untyped_storage())
    return storage._cdata  # noqa: SLF001 - what has no content has no address
