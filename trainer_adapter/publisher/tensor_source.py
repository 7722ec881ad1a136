"""What a publisher reads tensors from: a list of them, given out in buckets."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, cast

import torch

from rolloutbus.bus.wire.errors import Refused, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.publisher.named_tensors import (
    Rename,
    Tensors,
    named_tensors,
    published_dtype,
    renamed,
    require_publishable,
    require_whole,
)

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

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All tensors in their order; a bucket's may be gone when the next is asked for."""
        ...

    def give_up(self) -> None:
        """No bucket of this version will be asked for any more."""
        ...


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
        devices = {each.device for each in self.held if each.is_cuda}
        self._written = [torch.cuda.current_stream(each).record_event() for each in devices]

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        """All of them, once the GPU has written them."""
        for event in self._written:
            event.synchronize()
        yield self.held

    def give_up(self) -> None:
        """Nobody else waits."""


class StreamedTensors:
    """Tensors that exist one at a time: each is copied before the next one is asked for.

    With a layout they are copied to where they are published from. Without one there is no room
    for them before the last one is known: `held_copies` first makes copies on this host.

    Every name is published, also where several tensors lay in the same memory: a reused buffer
    cannot be told from a tied tensor.
    """

    def __init__(
        self, tensors: Tensors, rename: Rename | None = None, layout: Layout | None = None
    ) -> None:
        """Asks for nothing yet.

        Args:
            tensors: asked for once, in a thread, with the caller's GPU, stream and inference mode.
            rename: as of a publisher; also applied to the layout.
            layout: what they will be.

        Raises:
            SettingsError: the layout is none.
        """
        self._tensors = tensors
        self.has_layout = layout is not None
        self.held: Sequence[torch.Tensor] = ()
        self.tensors = _planned(layout, rename)
        self._pairs = renamed(tensors, rename)
        self._is_inferring = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

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
            raise _misplanned(missing, f"the iterator ended after {n_given} tensors, before it")

    def give_up(self) -> None:
        """End the iterator, so that it undoes what it did."""
        self._pairs.close()
        given = cast("object", self._tensors)
        if isinstance(given, Generator):
            cast("Generator[object]", given).close()

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
                copy = torch.empty(tensor.shape, dtype=published_dtype(tensor, dtype))
                copies[name] = copy.copy_(tensor)
        return HeldTensors(copies)

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


def _planned(layout: Layout | None, rename: Rename | None) -> list[SourceTensor]:
    planned: list[SourceTensor] = []
    for entry in layout or ():
        if not _is_planned(entry):
            raise SettingsError(
                "layout: (name, dtype, shape) of each tensor: a str, a torch.dtype and a list of "
                f"sizes; not {entry!r:.80}"
            )
        name, dtype, shape = entry
        published = name if rename is None else rename(name)
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
        raise _misplanned(name, f"the layout has {len(planned)} tensors, the iterator gave it too")
    there = planned[position]
    given = SourceTensor(name, tensor.dtype, tuple(tensor.shape))
    if given != there:
        shapes = f"{given.dtype} {list(given.shape)}, not {there.name!r} {there.dtype}"
        why = f"the iterator gave {given.name!r} {shapes} {list(there.shape)} in place {position}"
        raise _misplanned(there.name, why)


def _misplanned(name: str, why: str) -> Refused:
    return Refused(Problem("bad_request", why, "not_started", field=f"layout.{name}"))
