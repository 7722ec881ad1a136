"""Keeps which bytes of a version are here, from which source, and which tensors are verified."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rolloutbus.bus.weights.manifest import total_bytes
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.weights import Tensor

Giver = int
"""A source, by its place in the order in which they are asked."""


class AskedBytes(NamedTuple):
    """Bytes that are asked for at once."""

    offset: int
    size_bytes: int


class Layout:
    """Finds the tensors that lie in a byte range."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._starts = [each.offset for each in tensors]
        self._ends = [each.offset + each.size_bytes for each in tensors]

    def touched(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """(index of a tensor, how many of its bytes lie in the range), ascending."""
        end = offset + size_bytes
        index = bisect_right(self._ends, offset)
        while index < len(self._starts) and self._starts[index] < end:
            n_bytes = min(end, self._ends[index]) - max(offset, self._starts[index])
            if n_bytes > 0:
                yield index, n_bytes
            index += 1


class Arrival:
    """One version on its way here. A byte that was found right is never asked for again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._layout = Layout(tensors)
        self._wanted = deque(_pieces(0, total_bytes(tensors)))
        self._n_missing = [each.size_bytes for each in tensors]
        self._givers: list[set[Giver]] = [set() for _ in tensors]
        self._unchecked = deque(i for i, each in enumerate(tensors) if not each.size_bytes)
        self._n_unproven = len(tensors)

    @property
    def is_complete(self) -> bool:
        """Every tensor was found right."""
        return self._n_unproven == 0

    def take_piece(self) -> AskedBytes | None:
        """The next piece to ask for; None if all the rest has been asked for."""
        return self._wanted.popleft() if self._wanted else None

    def put_back(self, piece: AskedBytes) -> None:
        """A piece did not come: it has to be asked for again."""
        self._wanted.appendleft(piece)

    def came(self, piece: AskedBytes, giver: Giver) -> None:
        """The bytes of a piece are in their place."""
        for index, n_bytes in self._layout.touched(*piece):
            self._givers[index].add(giver)
            self._n_missing[index] -= n_bytes
            if self._n_missing[index] == 0:
                self._unchecked.append(index)

    def to_check(self, limit_bytes: int) -> list[int]:
        """Tensors that are here as a whole, by index; about `limit_bytes`, at least one of them."""
        found: list[int] = []
        for index in self._unchecked:
            found.append(index)
            limit_bytes -= self._tensors[index].size_bytes
            if limit_bytes <= 0:
                break
        return found

    def found_right(self, n: int) -> None:
        """The first `n` that are to be checked have the right digests."""
        for _ in range(n):
            self._unchecked.popleft()
        self._n_unproven -= n

    def found_wrong(self) -> set[Giver]:
        """Reject the first unchecked tensor; it is wanted again. Returns the peers that sent it."""
        index = self._unchecked.popleft()
        tensor = self._tensors[index]
        givers, self._givers[index] = self._givers[index], set()
        self._n_missing[index] = tensor.size_bytes
        # Its own bytes only: what lies beside them in a chunk may have been found right.
        self._wanted.extend(_pieces(tensor.offset, tensor.size_bytes))
        return givers


def _pieces(start: int, size_bytes: int) -> Iterator[AskedBytes]:
    end = start + size_bytes
    for offset in range(start, end, CHUNK_BYTES):
        yield AskedBytes(offset, min(CHUNK_BYTES, end - offset))
