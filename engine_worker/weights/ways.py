"""The transports that one engine host can take weights by."""

from collections.abc import Mapping

from engine_worker.weights.buffers import SpareBuffer
from engine_worker.weights.mapped import SharedMemory
from engine_worker.weights.pulled import Pull
from engine_worker.weights.staged import Fetcher


def ways_of_this_host() -> Mapping[str, Fetcher]:
    """Transport -> how it is done here; `tcp` always works."""
    spare = SpareBuffer()
    return {"shm": SharedMemory(), "tcp": Pull(spare)}
