"""A version that is written tensor by tensor, in any order, each copied before `put` returns."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from rolloutbus.bus.weights.manifest import bytes_of
from rolloutbus.bus.wire.messages.weights import Reserved, Tensor
from rolloutbus.trainer_adapter.publisher.early_verification import EarlyVerification
from rolloutbus.trainer_adapter.publisher.publication import Publication
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    TORCH_DTYPES,
    HeldTensors,
    SourceTensor,
    misplanned,
)
from rolloutbus.trainer_adapter.publisher.weight_writer import (
    CopyWatch,
    Judgement,
    Room,
    Written,
    in_thread,
    put,
)


class Pieces:
    """One version under way, and which of its tensors are there."""

    def __init__(self, publication: Publication, planned: Sequence[SourceTensor]) -> None:
        """Asks the store for nothing yet."""
        self._publication = publication
        self._layout = publication.laid_out(planned)
        self._places: Mapping[str, Tensor] = {each.name: each for each in self._layout}
        self._judgements: dict[str, Judgement] = {}
        self._watch = CopyWatch(publication.log.copied_so_far)
        self._putting: set[str] = set()
        """Names of tensors whose bytes are being written."""
        self._turn = asyncio.Lock()
        self._reserving: asyncio.Future[Reserved] | None = None
        self._room: tuple[Reserved, Room, EarlyVerification] | None = None
        self._gpu: torch.device | None = None
        """That a tensor came from."""

    async def put(self, source: HeldTensors) -> None:
        """Copy the one tensor of a source to its place, cast to the layout's dtype.

        Raises:
            Refused: it is not as the layout has it, or was put before.
        """
        (tensor,), (given,) = source.held, source.tensors
        place = self._place_of(given)
        self._putting.add(place.name)
        try:
            async with self._publication.writing():
                room, early = await self._reserved_room()
                work = partial(_copy, room, place, source, tensor)
                judged = await in_thread(work, self._watch.stop)
        finally:
            self._putting.discard(place.name)
        self._judgements[place.name] = judged
        self._watch.copied(place.size_bytes)
        if room.is_in_store:
            early.written(place, judged.digest)
        if tensor.is_cuda:
            self._gpu = tensor.device

    async def _reserved_room(self) -> tuple[Room, EarlyVerification]:
        async with self._turn:
            if self._room is None:
                reserved = await self._reserved()
                room = self._publication.room(reserved, self._layout)
                self._room = reserved, room, self._publication.early(reserved, self._layout)
        _, room, early = self._room
        return room, early

    async def _reserved(self) -> Reserved:
        """Returns the store's answer; a cancelled caller leaves it to the next one."""
        if self._reserving is None:
            self._reserving = asyncio.ensure_future(self._publication.reserve(self._layout))
        try:
            return await asyncio.shield(self._reserving)
        except Exception:
            self._reserving = None
            raise

    async def seal(self) -> None:
        """Freeze the version in the store.

        Raises:
            Refused: a tensor of the layout was not put, or is not sound; `.field` names it.
        """
        missing = [name for name in self._places if name not in self._judgements]
        if missing or self._room is None:
            why = f"it was not put, nor were {len(missing) - 1} others"
            raise misplanned(missing[0], why if len(missing) > 1 else "it was not put")
        reserved, room, _ = self._room
        judgements = [self._judgements[each.name] for each in self._layout]
        written = Written(*room, judgements, self._gpu)
        async with self._publication.writing():
            await self._publication.seal(reserved, self._layout, written)

    def _place_of(self, given: SourceTensor) -> Tensor:
        place = self._places.get(given.name)
        if place is None:
            raise misplanned(given.name, f"the layout has no tensor {given.name!r}")
        if given.name in self._judgements or given.name in self._putting:
            raise misplanned(given.name, f"{given.name!r} was put before")
        wanted = TORCH_DTYPES[place.dtype]
        may_be_cast = wanted.is_floating_point and given.dtype.is_floating_point
        if given.shape != tuple(place.shape) or not (given.dtype == wanted or may_be_cast):
            shown = f"{given.dtype} {list(given.shape)}, not {wanted} {list(place.shape)}"
            raise misplanned(given.name, f"{given.name!r} was put as {shown}")
        return place


def _copy(room: Room, place: Tensor, source: HeldTensors, tensor: torch.Tensor) -> Judgement:
    for _ in source.buckets():  # once the GPU has written it
        pass
    with torch.no_grad():
        return put(bytes_of(room.content, place), TORCH_DTYPES[place.dtype], tensor)
