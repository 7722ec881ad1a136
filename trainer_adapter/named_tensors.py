"""Tensors with names, from whatever a trainer has: a module, a state dict, or pairs."""

from collections.abc import Iterable, Mapping
from typing import cast

import torch

from bus.errors import SettingsError

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Pairs
"""A module (its parameters), a state dict, or (name, tensor) pairs."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""safetensors names of what may be published."""


def named_tensors(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every distinct tensor; of tied ones the first name stays.

    Raises:
        SettingsError: there is none, or one has a dtype that cannot be published.
    """
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for name, tensor in _pairs(tensors):
        if tensor.dtype not in DTYPE_NAMES:
            raise SettingsError(f"tensor {name!r}: {tensor.dtype} cannot be published")
        found.setdefault(_storage_of(name, tensor), (name, tensor.detach()))
    if not found:
        raise SettingsError("there are no tensors to publish")
    return list(found.values())


def _pairs(tensors: Tensors) -> Pairs:
    if isinstance(tensors, torch.nn.Module):
        return tensors.named_parameters()
    if isinstance(tensors, Mapping):
        return cast("Mapping[str, torch.Tensor]", tensors).items()
    return tensors


def published_dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """What the tensor is published as: `wanted` applies to floating-point tensors only."""
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def _storage_of(name: str, tensor: torch.Tensor) -> object:
    """The same for tied tensors, different for all others."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return name
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
