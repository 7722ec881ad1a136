"""One buffer that goes from version to version: fresh pages cost ten times the copy."""

import numpy as np

from bus.manifest import Bytes


class SpareBuffer:
    """Holds at most one buffer that nobody uses."""

    def __init__(self) -> None:
        self._spare: Bytes | None = None

    def take(self, size_bytes: int) -> Bytes:
        """A buffer of exactly that size, uint8; its content is arbitrary."""
        spare, self._spare = self._spare, None
        if spare is None or len(spare) < size_bytes:
            spare = np.empty(size_bytes, np.uint8)
        return spare[:size_bytes]

    def give_back(self, buffer: Bytes) -> None:
        """Nobody reads or writes it any more."""
        self._spare = buffer if buffer.base is None else np.asarray(buffer.base)

    def clear(self) -> None:
        """Give the memory back to the system."""
        self._spare = None
