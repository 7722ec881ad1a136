"""Tensors with names, from whatever a trainer has: a module, a state dict, or pairs."""

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import GeneratorType
from typing import Any, Protocol, cast

import torch

from rolloutbus.bus.weights.dtypes import DTYPES
from rolloutbus.bus.wire.errors import SettingsError

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Pairs
"""A module (its parameters), a state dict, or (name, tensor) pairs. Pairs that are not in a list
or a tuple are taken one at a time: each may be gone, or overwritten, when the next is asked for."""

Rename = Callable[[str], str | None]
"""The trainer's name of a tensor -> the engine's; None: it is not published."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.torch) for name, each in DTYPES.items() if each.torch
}
"""What may be published, by its safetensors name."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""And back."""


_PLAIN_ITEMS: tuple[object, ...] = tuple(vars(kind)["items"] for kind in (dict, OrderedDict))
_DICT_ITEMS = type(dict[str, torch.Tensor]().items())


class _Sharded(Protocol):
    """What is used of a DTensor."""

    def to_local(self) -> torch.Tensor: ...


def named_tensors(tensors: Tensors, rename: Rename | None = None) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every distinct tensor; of tied ones the first name stays.

    They are told apart by their memory, so all of them have to exist at once: see `are_held`. In a
    list of pairs only parameters may be tied: of other tensors there, a buffer used again looks the
    same.

    Raises:
        SettingsError: there is none, one has a dtype that cannot be published, two different
            ones have the same name, or two in a list are one buffer.
    """
    distinct = distinct_tensors(tensors, rename)
    if not distinct:
        raise SettingsError("there are no tensors to publish")
    return distinct


def distinct_tensors(
    tensors: Tensors, rename: Rename | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The same, but there may be none.

    Raises:
        SettingsError: as `named_tensors`.
    """
    found: dict[object, tuple[str, torch.Tensor]] = {}
    names: set[str] = set()
    for name, tensor in renamed(tensors, rename):
        require_publishable(name, tensor)
        storage = _storage_of(name, tensor)
        if storage in found:
            if isinstance(tensors, list | tuple) and not isinstance(tensor, torch.nn.Parameter):
                raise _one_buffer(found[storage][0], name)
            continue
        if name in names:
            raise SettingsError(f"two different tensors have the name {name!r}")
        names.add(name)
        found[storage] = (name, tensor.detach())
    return list(found.values())


def _one_buffer(first: str, second: str) -> SettingsError:
    return SettingsError(
        f"tensors {first!r} and {second!r} of a list lie in the same memory: clone each, or give "
        "an iterator, if a buffer is used again; if they are tied, publish the module or its state "
        f"dict, or leave {second!r} out of the list"
    )


def are_held(tensors: Tensors) -> bool:
    """Whether all of them exist side by side until they are published.

    An iterator promises a tensor only until the next one is asked for: it may gather, merge or
    reuse a buffer. `Module.named_parameters` alone is known to give out what the module holds.
    """
    if isinstance(tensors, dict):  # a dict of another kind may make them as they are asked for
        return inspect.getattr_static(cast("object", tensors), "items") in _PLAIN_ITEMS
    if isinstance(tensors, torch.nn.Module | list | tuple):
        return True
    if isinstance(tensors, GeneratorType):
        code = cast("GeneratorType[Any, Any, Any]", tensors).gi_code
        return code is torch.nn.Module.named_parameters.__code__
    return isinstance(tensors, _DICT_ITEMS)


def renamed(tensors: Tensors, rename: Rename | None) -> Generator[tuple[str, torch.Tensor]]:
    """What is to be published of them, under the engine's names, as it is asked for."""
    for pair in _pairs(tensors):
        name, tensor = _checked(pair)
        del pair
        published = name if rename is None else rename(name)
        if published is not None:
            yield published, tensor
        del tensor  # or it would be held while the next one is made


def require_tensors(tensors: object) -> None:
    """Check that names and tensors can come out of it.

    Raises:
        SettingsError: it is a path, or nothing of the kind.
    """
    if isinstance(tensors, str | bytes | os.PathLike):
        what = "a path: load it first, e.g. with safetensors.torch.load_file"
        raise SettingsError(f"tensors are published, not {what}")
    if not isinstance(tensors, torch.nn.Module | Iterable):
        what = f"a value of type {type(tensors).__name__}"
        raise SettingsError(f"a module, a state dict or (name, tensor) pairs, not {what}")


def _pairs(tensors: Tensors) -> Pairs:
    if isinstance(tensors, torch.nn.Module):
        return tensors.named_parameters(remove_duplicate=False)
    if isinstance(tensors, Mapping):
        return cast("Mapping[str, torch.Tensor]", tensors).items()
    return tensors


def published_dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """What the tensor is published as: `wanted` applies to floating-point tensors only."""
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


PAIR = len(("name", "tensor"))


def _checked(pair: object) -> tuple[str, torch.Tensor]:
    """A pair, of whatever an iterator gives.

    Raises:
        SettingsError: it is none.
    """
    kind = type(pair).__name__
    is_pair = isinstance(pair, tuple | list) and len(cast("Sequence[object]", pair)) == PAIR
    name, tensor = cast("Sequence[object]", pair) if is_pair else (None, None)
    if isinstance(name, str) and isinstance(tensor, torch.Tensor):
        return name, tensor
    what = f"a value of type {kind} where (name, tensor) belongs"
    if isinstance(name, str):
        what = f"{name!r} is no tensor"
    raise SettingsError(f"a module, a state dict or (name, tensor) pairs are published: {what}")


def require_publishable(name: str, tensor: torch.Tensor) -> None:
    """Check the dtype.

    Raises:
        SettingsError: it has no name in a manifest.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise SettingsError(f"tensor {name!r}: {tensor.dtype} cannot be published")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def require_whole(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that these can be published by this rank alone.

    Raises:
        SettingsError: one is sharded.
    """
    for name, tensor in named:
        if is_sharded(tensor):
            raise SettingsError(
                f"tensor {name!r} is sharded over several ranks; publish a ShardedSource"
            )


def _storage_of(name: str, tensor: torch.Tensor) -> object:
    """The same for tied tensors, different for all others."""
    if is_sharded(tensor):
        part = cast("_Sharded", tensor).to_local()
        # A rank may hold nothing of it: then only the object tells it from others.
        return (id(tensor),) if part.numel() == 0 else (*_place_of(part), tensor.shape)
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (name,)
    return _place_of(tensor)


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
