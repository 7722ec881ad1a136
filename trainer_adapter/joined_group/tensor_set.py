"""The tensors of one version, as they come in over joined groups, until none is missing."""

from collections import Counter
from collections.abc import Generator, Sequence
from math import prod
from typing import NamedTuple

import torch

from rolloutbus.bus.weights.manifest import ALIGN_BYTES, DTYPES, bytes_in
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.trainer_adapter.joined_group.orders import Piece, Receive
from rolloutbus.trainer_adapter.publisher.tensor_source import TORCH_DTYPES, Layout

MAX_NAMED = 8
"""Missing tensors that a sentence lists."""


class Placed(NamedTuple):
    """One tensor of a bucket, and its bytes there."""

    form: TensorForm
    start: int
    size_bytes: int


class BucketPlan(NamedTuple):
    """How the tensors of one bucket come in."""

    placed: list[Placed]
    """Where each comes to lie in the bucket."""
    order: Receive


def plan_of(forms: Sequence[TensorForm], packed_bytes: int | None) -> BucketPlan:
    """The broadcasts that bring these tensors.

    Args:
        forms: the tensors in rank 0's order.
        packed_bytes: None: each comes alone, as what it is. Else their bytes come one after another
            as uint8, and a broadcast ends with the first tensor that makes it larger than this; 0:
            all come in one.
    """
    placed: list[Placed] = []
    pieces: list[Piece] = []
    offset = began = 0
    for form in forms:
        size_bytes = bytes_in(form)
        placed.append(Placed(form, offset, size_bytes))
        if packed_bytes is None:
            pieces.append(Piece(DTYPES[form.dtype].torch, offset, prod(form.shape)))
            offset += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            continue
        offset += size_bytes
        if packed_bytes and offset - began > packed_bytes:
            pieces.append(Piece("uint8", began, offset - began))
            began = offset
    if packed_bytes is not None and offset > began:
        pieces.append(Piece("uint8", began, offset - began))
    return BucketPlan(placed, Receive(max(offset, 1), pieces))


class TensorSet:
    """What a version must hold, and what of it is in."""

    def __init__(self, forms: Sequence[TensorForm]) -> None:
        """`forms`: all that it must hold."""
        self._forms = {each.name: each for each in forms}
        self._bytes: dict[str, torch.Tensor] = {}

    @property
    def n_in(self) -> int:
        """Tensors that are in."""
        return len(self._bytes)

    @property
    def n_all(self) -> int:
        """Tensors of the whole."""
        return len(self._forms)

    @property
    def missing(self) -> list[str]:
        """Names of those that are not in."""
        return [name for name in self._forms if name not in self._bytes]

    @property
    def sentence(self) -> str:
        """How many are in, and which are missing."""
        names = self.missing
        shown = ", ".join(map(repr, names[:MAX_NAMED]))
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        missing = f"; missing: {shown}{more}" if names else ""
        return f"{self.n_in} of {self.n_all} tensors are in{missing}"

    @property
    def layout(self) -> Layout:
        """Of `tensors`."""
        return [(name, TORCH_DTYPES[each.dtype], each.shape) for name, each in self._forms.items()]

    def problem_of(self, forms: Sequence[TensorForm]) -> Problem | None:
        """Why these cannot be added; None if they can."""
        counts = Counter(each.name for each in forms)
        for each in forms:
            wanted = self._forms.get(each.name)
            if wanted is None:
                why = "the fleet's model has no such tensor"
            elif each.name in self._bytes or counts[each.name] > 1:
                why = "it came before, for the same version"
            elif each != wanted:
                why = (
                    f"it is {each.dtype} {list(each.shape)}, the fleet's is {wanted.dtype} "
                    f"{list(wanted.shape)}"
                )
            else:
                continue
            return bad_request(f"tensors.{each.name}", f"tensor {each.name!r}: {why}")
        return None

    def add(self, placed: Sequence[Placed], content: torch.Tensor) -> None:
        """Take tensors for which there is no problem; `content` holds the bytes of their bucket."""
        for form, start, size_bytes in placed:
            self._bytes[form.name] = content[start : start + size_bytes]

    def forget(self) -> None:
        """None of them is in any more."""
        self._bytes.clear()

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Each tensor, in the order of `layout`; all are in."""
        for name, dtype, shape in self.layout:
            raw = self._bytes[name]
            if raw.storage_offset() % dtype.itemsize:
                raw = raw.clone()  # it was packed behind one of another size
            yield name, raw.view(dtype).reshape(tuple(shape))
