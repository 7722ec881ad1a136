"""A Ray actor that runs one process of a fleet on its node, and reports what becomes of it.

It restarts nothing: the supervisor in the program that brought the fleet up does.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import asyncio
import atexit
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import ray
import ray.util

from rolloutbus.bus.actor.child import ChildProcess, ProcessSpec
from rolloutbus.bus.actor.process import COMPLAINT, ActorExit
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher.engine_python import check_python, find_python
from rolloutbus.launcher.plan import WORKER_GRACE_S, FleetKeys, environment, python
from rolloutbus.launcher.run_dir import RunDirectory

LOG_EVERY_S = 0.5
"""Between two looks at a log that grows."""
REPORT_S = 5.0
"""A report comes at least so often, so that silence shows."""
LOG_PART_BYTES = 256 * 1024
"""Of a log in one report."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a node needs to run one worker."""

    settings: WorkerSettings
    """With the paths of keys and the address of streams still to be filled in."""
    interpreter: str
    """As `FleetSettings.python`."""
    packages: Sequence[str]
    """That this interpreter must have."""
    variables: Mapping[str, str]
    """Of the program's environment, besides the node's own."""
    keys: Mapping[str, bytes] = field(repr=False)
    """Name of a file of keys -> its content."""


Order = ProcessSpec | WorkerOrder
"""A process of the program's own node, with its paths; or a worker on any node."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where Ray has put an actor."""

    node: str
    """Ray's id of the node."""
    host: str
    """Its address, which every other node can reach."""
    gpus: tuple[str, ...]
    """Ids of the GPUs that Ray gave the actor."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that the process said."""

    kind: Literal["ready", "told", "progress"]
    endpoints: Mapping[str, str]
    sentence: str


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last report that was read."""

    happenings: Sequence[Happening]
    log: bytes
    status: int | None
    """Exit status, once the process has ended and all before has been reported."""


def place_here() -> Place:
    """The node of this process, and the GPUs that Ray gave it."""
    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    node = ray.get_runtime_context().get_node_id()
    return Place(node, ray.util.get_node_ip_address(), gpus)


class GpuHolder:
    """Holds the GPU of one bundle for a worker whose actor is in another bundle of the node."""

    def here(self) -> Place:
        """Where this is, with the GPU."""
        return place_here()


class ProcessHost:
    """One process and its end; an actor of Ray, asynchronous, never restarted by Ray."""

    def __init__(self) -> None:
        self._files = contextlib.ExitStack()
        self._child: ChildProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._news = asyncio.Event()
        self._happenings: list[Happening] = []
        self._n_forgotten = 0
        """Happenings before those of the list: their reports were read."""
        self._log: Path | None = None
        """Only of a worker: others write into the program's run directory themselves."""
        self._status: int | None = None
        self._last: Report | None = None
        atexit.register(self._files.close)  # Ray may end this process first

    async def here(self) -> Place:
        """Where Ray has put this actor."""
        return place_here()

    async def start(self, order: Order, gpus: Sequence[str]) -> int:
        """Start the process; returns its process id, 0 if it cannot work here.

        Args:
            order: what to run.
            gpus: ids of all GPUs of this node that it may use; none: Ray's choice stands.
        """
        async with self._starting:  # Ray may have asked before, and not got the answer
            return self._child.pid if self._child is not None else await self._start(order, gpus)

    async def _start(self, order: Order, gpus: Sequence[str]) -> int:
        try:
            spec = order if isinstance(order, ProcessSpec) else await self._prepared(order, gpus)
            self._child = await spec.start(self._became_ready, self._told, self._progressed)
        except (SettingsError, OSError) as error:
            self._told(f"{COMPLAINT}{error}")
            self._end(ActorExit.SETTINGS)
            return 0
        self._watching = asyncio.create_task(self._watch(self._child), name="watch the process")
        return self._child.pid

    async def report(self, n_heard: int, log_read: int) -> Report:
        """Wait for news, a few seconds; news come again if the next call has not read them.

        Args:
            n_heard: happenings that were read in earlier reports.
            log_read: bytes of the log that were read.
        """
        if self._last is not None:
            return self._last
        del self._happenings[: n_heard - self._n_forgotten]
        self._n_forgotten = n_heard
        looks = int(REPORT_S / LOG_EVERY_S)
        while not (log := self._part_of_log(log_read)) and looks:
            self._news.clear()
            if self._happenings or self._status is not None:
                break
            looks -= 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOG_EVERY_S):
                    await self._news.wait()
        is_last = self._status is not None and len(log) < LOG_PART_BYTES
        report = Report(list(self._happenings), log, self._status if is_last else None)
        if is_last:
            self._last = report
            self._files.close()
        return report

    async def stop(self) -> None:
        """Have the process leave; the report tells of its end."""
        if self._child is not None:
            await self._child.stop()

    async def kill(self) -> None:
        """SIGKILL the process and all that it started."""
        if self._child is not None:
            self._child.kill()

    async def _prepared(self, order: WorkerOrder, gpus: Sequence[str]) -> ProcessSpec:
        """The process of a worker, with a directory and keys on this node."""
        place = place_here()
        directory = self._files.enter_context(RunDirectory())
        keys = FleetKeys(directory.path / "keys")
        keys.write(order.keys)
        name = order.settings.name
        settings = msgspec.structs.replace(
            order.settings, stream=f"tcp://{place.host}:0", security=keys.security_of(name)
        )
        variables = {**environment(), **order.variables}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        interpreter = order.interpreter and find_python(order.interpreter)
        if interpreter:
            await asyncio.to_thread(check_python, interpreter, order.packages, variables)
        file = directory.path / f"{name}.json"
        file.write_bytes(msgspec.json.encode(settings))
        self._log = directory.logs / f"{name}.log"
        command = [*python("rolloutbus.engine_worker", interpreter), "--settings-file", str(file)]
        return ProcessSpec(name, command, self._log, variables, grace_s=WORKER_GRACE_S)

    async def _watch(self, child: ChildProcess) -> None:
        self._end(await child.wait())

    def _became_ready(self, endpoints: dict[str, str]) -> None:
        self._happened(Happening("ready", endpoints, ""))

    def _told(self, sentence: str) -> None:
        self._happened(Happening("told", {}, sentence))

    def _progressed(self, doing: str) -> None:
        self._happened(Happening("progress", {}, doing))

    def _happened(self, happening: Happening) -> None:
        self._happenings.append(happening)
        self._news.set()

    def _end(self, status: int) -> None:
        self._status = status
        self._news.set()

    def _part_of_log(self, start: int) -> bytes:
        if self._log is None or not self._log.exists():
            return b""
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read(LOG_PART_BYTES)
