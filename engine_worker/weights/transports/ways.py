"""The transports that one engine host can take weights by."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.engine_worker.engine import Engine
from rolloutbus.engine_worker.weights.buffers import SpareBuffer, fresh_buffer
from rolloutbus.engine_worker.weights.relay import Relay
from rolloutbus.engine_worker.weights.staged import Fetcher
from rolloutbus.engine_worker.weights.transports.collective import Collective
from rolloutbus.engine_worker.weights.transports.delta import ChangedSince
from rolloutbus.engine_worker.weights.transports.disk import Files
from rolloutbus.engine_worker.weights.transports.shm import SharedMemory
from rolloutbus.engine_worker.weights.transports.tcp import Pull


def ways_of_this_host(
    relay: Relay | None = None,
    dialer: Dialer | None = None,
    engine: Engine | None = None,
    root: str = "",
) -> Mapping[str, Fetcher]:
    """The fetcher of each transport that works here; `tcp` always does.

    `relay` serves what arrives to other workers; `dialer` has the keys to connect with, if any;
    `root` is a directory in which versions may be read from files, empty: none. `engine`: if its
    weights can be read, only what changed need be brought; versions are put into its shared
    memory, if it has any.
    """
    relay = relay or Relay()
    shared = engine.shared if engine is not None else None
    spare = SpareBuffer(relay.forget, shared.shared_buffer if shared else fresh_buffer)
    ways: dict[str, Fetcher] = {"shm": SharedMemory(), "tcp": Pull(spare, relay, dialer)}
    if engine is not None and engine.weights is not None:
        ways["delta"] = ChangedSince(engine.weights, spare)
    if root:
        ways["disk"] = Files(Path(root), spare)
    gpus = engine.facts.gpus if engine is not None else ()
    if find_spec("torch") is not None:
        ways["collective"] = Collective(spare, gpus)
    if len(gpus) == 1:
        # Imports torch, as its engine has done already.
        from rolloutbus.engine_worker.weights.transports.cuda_ipc import CudaIpc  # noqa: PLC0415

        ways["cuda_ipc"] = CudaIpc(gpus[0], shared.handles if shared else None)
    return ways
