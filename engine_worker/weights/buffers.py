"""One buffer that goes from version to version: fresh pages cost ten times the copy."""

from collections.abc import Callable

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes


def _nobody_reads(_: Bytes) -> None:
    """The content of a spare buffer matters to nobody."""


def fresh_buffer(size_bytes: int) -> Bytes:
    """Memory of this process, uint8."""
    return np.empty(size_bytes, np.uint8)


class SpareBuffer:
    """Holds at most one buffer that nobody writes."""

    def __init__(
        self,
        on_gone: Callable[[Bytes], None] = _nobody_reads,
        make: Callable[[int], Bytes] = fresh_buffer,
    ) -> None:
        """`on_gone` hears of a buffer before it is written again, or given up; `make` makes one."""
        self._spare: Bytes | None = None
        self._on_gone = on_gone
        self._make = make

    def take(self, size_bytes: int) -> Bytes:
        """A buffer of exactly that size, uint8; its content is arbitrary."""
        spare = self._let_go()
        if spare is None or len(spare) < size_bytes:
            spare = self._make(size_bytes)
        return spare[:size_bytes]

    def give_back(self, buffer: Bytes) -> None:
        """Nobody writes it any more; it keeps its content until it is taken."""
        self._let_go()
        self._spare = whole(buffer)

    def clear(self) -> None:
        """Give the memory back to the system."""
        self._let_go()

    def _let_go(self) -> Bytes | None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._on_gone(spare)
        return spare


def whole(buffer: Bytes) -> Bytes:
    """The buffer that this one is a part of."""
    return buffer if buffer.base is None else np.asarray(buffer.base)
