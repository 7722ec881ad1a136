"""What a publisher reads tensors from: a list of them, given out in buckets."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import GeneratorType
from typing import Any, NamedTuple, Protocol, cast

import torch

from rolloutbus.bus.weights.manifest import DTYPES
from rolloutbus.bus.wire.errors import Refused, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Pairs
"""A module (its parameters), a state dict, or (name, tensor) pairs. Pairs that are not in a list
or a tuple are taken one at a time: each may be gone, or overwritten, when the next is asked for."""

Rename = Callable[[str], str | None]
"""The trainer's name of a tensor -> the engine's; None: it is not published."""

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that torch.compile, FSDP and activation checkpointing put into names."""
DATA_PARALLEL = "module"
"""The part that DDP puts before names."""


def without_wrappers(name: str) -> str:
    """The name that a tensor has in the model itself, without what wrappers put before it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == DATA_PARALLEL:
        del parts[0]
    return ".".join(parts)


def published_name(name: str, rename: Rename | None) -> str | None:
    """What the engine calls it; None: it is not published. Without `rename`, wrappers go."""
    return without_wrappers(name) if rename is None else rename(name)


def as_published(name: str) -> str:
    """The `rename` of names that are the engine's already."""
    return name


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.torch) for name, each in DTYPES.items() if each.torch
}
"""Safetensors name -> torch dtype, for all dtypes that may be published."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch dtype -> its safetensors name."""


_PLAIN_ITEMS: tuple[object, ...] = tuple(vars(kind)["items"] for kind in (dict, OrderedDict))
_DICT_ITEMS = type(dict[str, torch.Tensor]().items())


class Mesh(Protocol):
    """The ranks that hold parts of a tensor."""

    mesh: torch.Tensor


class Sharded(Protocol):
    """The members of a DTensor that are used here."""

    device_mesh: Mesh
    full_tensor: Callable[[], torch.Tensor]
    to_local: Callable[[], torch.Tensor]


def named_tensors(
    tensors: Tensors, rename: Rename | None = None, *, may_be_empty: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every distinct tensor; of tied ones the first name stays.

    Tensors are distinguished by their memory, so all of them have to exist at once: see `are_held`.
    In a list of pairs only parameters may be tied: of other tensors there, a buffer used again
    looks the same.

    Raises:
        SettingsError: there is none, one has a dtype that cannot be published, two different
            ones have the same name, or two in a list are one buffer.
    """
    found: dict[object, tuple[str, torch.Tensor]] = {}
    names: set[str] = set()
    for name, tensor in renamed(tensors, rename):
        require_publishable(name, tensor)
        storage = _storage_of(name, tensor)
        if storage in found:
            if isinstance(tensors, list | tuple) and not isinstance(tensor, torch.nn.Parameter):
                raise SettingsError(
                    f"tensors {found[storage][0]!r} and {name!r} of a list lie in the same memory: "
                    "clone each, or give an iterator, if a buffer is used again; if they are tied, "
                    f"publish the module or its state dict, or leave {name!r} out of the list"
                )
            continue
        if name in names:
            raise SettingsError(f"two different tensors have the name {name!r}")
        names.add(name)
        found[storage] = (name, tensor.detach())
    if not found and not may_be_empty:
        raise SettingsError("there are no tensors to publish")
    return list(found.values())


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
    """Yields the tensors to publish under the engine's names, one when the caller asks."""
    for pair in _pairs(tensors):
        name, tensor = _checked(pair)
        del pair
        published = published_name(name, rename)
        if published is not None:
            yield published, tensor
        del tensor  # or it would be held while the next one is made


def require_tensors(tensors: object) -> None:
    """Check that names and tensors can come out of it.

    Raises:
        SettingsError: it is nothing of the kind.
    """
    if isinstance(tensors, bytes):
        raise SettingsError("a file's content is not published: give the path of its directory")
    if not isinstance(tensors, torch.nn.Module | Iterable):
        what = f"a value of type {type(tensors).__name__}"
        raise SettingsError(f"a module, a state dict or (name, tensor) pairs, not {what}")


def _pairs(tensors: Tensors) -> Pairs:
    if isinstance(tensors, torch.nn.Module):
        return tensors.named_parameters(remove_duplicate=False)
    if isinstance(tensors, Mapping):
        return cast("Mapping[str, torch.Tensor]", tensors).items()
    return tensors


def published_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What such a tensor is published as: `wanted` applies to floating-point types only."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def require_castable(dtype: torch.dtype | None) -> None:
    """Check what floating-point tensors are to be cast to; None: they are not.

    Raises:
        SettingsError: it is no floating-point type that can be published.
    """
    if dtype is not None and not (dtype.is_floating_point and dtype in DTYPE_NAMES):
        raise SettingsError(f"dtype: weights cannot be cast to {dtype} and published")


def _checked(pair: object) -> tuple[str, torch.Tensor]:
    """A pair that an iterator gave; raises SettingsError if it is none."""
    match pair:
        case (str(name), torch.Tensor() as tensor):
            return name, tensor
        case (str(name), object()):
            what = f"{name!r} is no tensor"
        case _:
            what = f"a value of type {type(pair).__name__} where (name, tensor) belongs"
    raise SettingsError(f"a module, a state dict or (name, tensor) pairs are published: {what}")


def require_publishable(name: str, tensor: torch.Tensor) -> None:
    """Check dtype and layout.

    Raises:
        SettingsError: its dtype has no name in a manifest, or it is sparse.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise SettingsError(f"tensor {name!r}: {tensor.dtype} cannot be published")
    if tensor.layout != torch.strided:
        raise SettingsError(f"tensor {name!r} is sparse: publish tensor.to_dense()")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def require_whole(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that this rank has all values of these.

    Raises:
        SettingsError: one is sharded, or has none.
    """
    for name, tensor in named:
        if is_sharded(tensor):
            raise SettingsError(
                f"tensor {name!r} is sharded over several ranks; publish a ShardedSource"
            )
        if tensor.is_meta:
            raise SettingsError(f"tensor {name!r} is on the meta device: it has no values")


def _storage_of(name: str, tensor: torch.Tensor) -> object:
    """The same for tied tensors, different for all others."""
    if is_sharded(tensor):
        part = cast("Sharded", tensor).to_local()
        # A rank may hold nothing of it: then only the object tells it from others.
        return (id(tensor),) if part.numel() == 0 else (*_place_of(part), tensor.shape)
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (name,)
    return _place_of(tensor)


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    noted = (tensor.is_conj(), tensor.is_neg())  # it shares memory, and has other values
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *noted)


Layout = Sequence[tuple[str, torch.dtype, Sequence[int]]]
"""(name, dtype, shape) of each tensor that an iterator will give, in its order and its names."""


class SourceTensor(NamedTuple):
    """One tensor that will be given out."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a version; the same ones, with other values, of the next.

    For each version `buckets` is called at most once, and then `give_up` once, both in a thread.
    """

    @property
    def tensors(self) -> Sequence[SourceTensor]:
        """What will be given out, in this order."""
        ...

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """All of them if they are all at hand, in this order; else nothing."""
        ...

    def wait_written(self) -> None:
        """Wait until the GPU has written what is held; in a thread."""
        ...

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All tensors in their order; a bucket's may be gone when the next is asked for."""
        ...

    def give_up(self) -> None:
        """No bucket of this version will be asked for any more."""
        ...


class QueuedWork:
    """What the calling thread has asked of its current streams so far."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of the GPUs that these are on."""
        gpus = {each.device for each in tensors if each.is_cuda}
        self._events = [(gpu, torch.cuda.current_stream(gpu).record_event()) for gpu in gpus]

    def wait(self) -> None:
        """Waits until the GPU work is done; call it in another thread, which has other streams."""
        for gpu, event in self._events:
            with torch.cuda.device(gpu):  # or a thread that has none begins to use the first one
                event.synchronize()


class HeldTensors:
    """Tensors that the trainer has as they are, in one bucket."""

    def __init__(self, tensors: Tensors, rename: Rename | None = None) -> None:
        """Takes note of them at once, and of the work on their GPU that they wait for.

        Raises:
            SettingsError: as `named_tensors`, or one is a shard.
        """
        named = named_tensors(tensors, rename)
        require_whole(named)
        self.held = [tensor for _, tensor in named]
        self.tensors = [SourceTensor(name, each.dtype, tuple(each.shape)) for name, each in named]
        self._queued = QueuedWork(self.held)

    def wait_written(self) -> None:
        """See `TensorSource`."""
        self._queued.wait()

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All of them, once the GPU has written them."""
        self.wait_written()
        yield self.held

    def give_up(self) -> None:
        """Nothing to do: no other rank waits."""


class StreamedTensors:
    """Tensors that exist one at a time: each is copied before the next one is asked for.

    With a layout they are copied to where they are published from. Without one there is no room
    for them before the last one is known: `held_copies` first makes copies on this host.

    Every name is published, also where several tensors lay in the same memory: a reused buffer
    looks like a tied tensor.
    """

    def __init__(
        self,
        tensors: Tensors,
        rename: Rename | None = None,
        layout: Layout | None = None,
        *,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Asks for nothing yet.

        Args:
            tensors: asked for once, in a thread, with the caller's GPU, stream and inference mode.
            rename: as of a publisher; also applied to the layout.
            layout: what they will be.
            at_end: called when nothing more is read, whatever was.

        Raises:
            SettingsError: the layout is none.
        """
        self._tensors = tensors
        self._at_end = at_end
        self.has_layout = layout is not None
        self.held: Sequence[torch.Tensor] = ()
        self.tensors = planned_tensors(layout, rename)
        self._pairs = renamed(tensors, rename)
        self._is_inferring = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def wait_written(self) -> None:
        """Nothing is held."""

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """One tensor each.

        Raises:
            Refused: it is not the one that the layout has in this place.
            SettingsError: it cannot be published.
        """
        n_given = 0
        for name, tensor in self._given():
            if self.has_layout:
                _require_planned(self.tensors, n_given, name, tensor)
            n_given += 1
            yield [tensor]
            del tensor
        if self.has_layout and n_given < len(self.tensors):
            missing = self.tensors[n_given].name
            raise misplanned(missing, f"the iterator ended after {n_given} tensors, before it")

    def give_up(self) -> None:
        """End the iterator, so that it undoes what it did."""
        self._pairs.close()
        given = cast("object", self._tensors)
        if isinstance(given, Generator):
            cast("Generator[object]", given).close()
        if self._at_end is not None:
            self._at_end()

    def held_copies(
        self, dtype: torch.dtype | None, before_each: Callable[[], None]
    ) -> "HeldTensors":
        """Copy all of them to host memory, cast; `before_each` may raise to stop it.

        Raises:
            SettingsError: one cannot be published, or there is none.
        """
        copies: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._given():
                if name in copies:
                    raise SettingsError(f"two different tensors have the name {name!r}")
                before_each()
                copy = torch.empty(tensor.shape, dtype=published_dtype(tensor.dtype, dtype))
                copies[name] = copy.copy_(tensor)
        return HeldTensors(copies, as_published)

    def _given(self) -> Generator[tuple[str, torch.Tensor]]:
        """Each tensor as soon as its GPU has written it."""
        while True:
            with ExitStack() as caller:
                if self._stream is not None:
                    caller.enter_context(torch.cuda.stream(self._stream))
                if self._is_inferring:
                    caller.enter_context(torch.inference_mode())
                pair = next(self._pairs, None)
                if pair is None:
                    return
                name, tensor = pair
                require_publishable(name, tensor)
                require_whole([pair])
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()
            del pair
            yield name, tensor.detach()
            del tensor


def planned_tensors(layout: Layout | None, rename: Rename | None) -> list[SourceTensor]:
    """What a layout announces, under the engine's names; nothing if there is no layout.

    Raises:
        SettingsError: it is no layout, announces nothing, or a dtype that cannot be published.
    """
    planned: list[SourceTensor] = []
    for entry in layout or ():
        if not _is_planned(entry):
            raise SettingsError(
                "layout: (name, dtype, shape) of each tensor: a str, a torch.dtype and a list of "
                f"sizes; not {entry!r:.80}"
            )
        name, dtype, shape = entry
        if dtype not in DTYPE_NAMES:
            raise SettingsError(f"layout: tensor {name!r}: {dtype} cannot be published")
        published = published_name(name, rename)
        if published is not None:
            planned.append(SourceTensor(published, dtype, tuple(shape)))
    if layout is not None and not planned:
        raise SettingsError("layout: there are no tensors to publish")
    return planned


def _is_planned(entry: object) -> bool:
    if not isinstance(entry, tuple | list):
        return False
    parts = cast("Sequence[object]", entry)
    if len(parts) != len(SourceTensor._fields):
        return False
    name, dtype, shape = parts
    return (
        isinstance(name, str)
        and isinstance(dtype, torch.dtype)
        and isinstance(shape, tuple | list)
        and all(isinstance(size, int) and size >= 0 for size in cast("Sequence[object]", shape))
    )


def _require_planned(
    planned: Sequence[SourceTensor], position: int, name: str, tensor: torch.Tensor
) -> None:
    if position >= len(planned):
        raise misplanned(name, f"the layout has {len(planned)} tensors, the iterator gave it too")
    there = planned[position]
    given = SourceTensor(name, tensor.dtype, tuple(tensor.shape))
    if given != there:
        shapes = f"{given.dtype} {list(given.shape)}, not {there.name!r} {there.dtype}"
        why = f"the iterator gave {given.name!r} {shapes} {list(there.shape)} in place {position}"
        raise misplanned(there.name, why)


def misplanned(name: str, why: str) -> Refused:
    """The error for a tensor that is not as the layout has it."""
    return Refused(Problem("bad_request", why, "not_started", field=f"layout.{name}"))
