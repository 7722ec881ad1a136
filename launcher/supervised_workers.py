"""The workers of a fleet as supervised processes: which run, which leave, which failed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from rolloutbus.bus.actor.child import Program
from rolloutbus.bus.actor.supervisor import SupervisedProcess, Supervisor
from rolloutbus.bus.wire.errors import ProcessFailed, SettingsError
from rolloutbus.launcher.scaling import WorkerPlace


class WorkerPlan(Protocol):
    """What a launcher knows of its workers: the processes, and who has which place."""

    places: dict[str, WorkerPlace]
    """Of workers that run, leave, or are to be started, by name."""

    @property
    def key_file(self) -> str:
        """Key of an admin; empty where no keys are asked for."""
        ...

    def take_places(
        self, n: int, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> list[WorkerPlace]:
        """Names for so many more workers; SettingsError, and none taken, if there is no room."""
        ...

    def give_back(self, name: str) -> None:
        """The worker is gone: its name is free."""
        ...

    def worker(self, name: str, backend: str) -> Program:
        """The program of a worker that has a place, which joins at `backend`."""
        ...


class SupervisedWorkers:
    """What `launcher.scaling.Scaling` asks of a launcher whose processes a `Supervisor` keeps."""

    def __init__(
        self,
        supervisor: Supervisor,
        plan: WorkerPlan,
        address: Callable[[], str],
        backend_of: Callable[[str], str],
        on_change: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            supervisor: keeps the processes running.
            plan: says what a worker's process is, and who has which place.
            address: says where clients connect.
            backend_of: says where the worker of a name joins.
            on_change: called when a worker has come or gone.
        """
        self._supervisor = supervisor
        self._plan = plan
        self._address = address
        self._backend_of = backend_of
        self._on_change = on_change
        self._rank: list[SupervisedProcess] = []
        self._running: dict[str, SupervisedProcess] = {}
        self._leaving: dict[str, SupervisedProcess] = {}
        self._failures: dict[str, ProcessFailed] = {}

    def start_first(self) -> None:
        """Start all that have a place; see `Supervisor.wait_ready`."""
        specs = [self._plan.worker(name, self._backend_of(name)) for name in self._plan.places]
        self._rank = self._supervisor.start(*specs)
        for process in self._rank:
            self._running[process.spec.name] = process
            process.on_end = partial(self._ended, process)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._address()

    @property
    def key_file(self) -> str:
        """Key of an admin; empty where no keys are asked for."""
        return self._plan.key_file

    @property
    def worker_names(self) -> list[str]:
        """Workers that are to run, by number; not those that leave."""
        return sorted(self._running, key=lambda name: self._plan.places[name].number)

    @property
    def processes(self) -> list[SupervisedProcess]:
        """Those of all workers, also of those that leave."""
        return [*self._running.values(), *self._leaving.values()]

    def named(self, name: str) -> SupervisedProcess:
        """The process of a worker that is to run.

        Raises:
            SettingsError: there is no such worker; it names those that there are.
        """
        process = self._running.get(name)
        if process is None:
            names = ", ".join(self.worker_names)
            raise SettingsError(f"no worker {name!r:.80}: there are {names}")
        return process

    def take_places(
        self, n: int, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> list[WorkerPlace]:
        """See `FleetPlan.take_places`."""
        return self._plan.take_places(n, gpus=gpus, env=env)

    def place_of(self, name: str) -> WorkerPlace:
        """The place of a worker that is to run; raises as `named`."""
        self.named(name)
        return self._plan.places[name]

    def begin(self, place: WorkerPlace) -> None:
        """Start a worker on trial.

        Raises:
            ActorStopped: the fleet is ending.
            ProcessFailed: the disk has no room for its settings.
        """
        name = place.name
        self._plan.places[name] = place
        self._failures.pop(name, None)
        try:
            spec = self._plan.worker(name, self._backend_of(name))
        except OSError as error:  # its settings are a file
            raise ProcessFailed(name, f"it cannot be started: {error}") from error
        process = self._running[name] = self._supervisor.add(self._rank, spec)
        process.on_end = partial(self._ended, process)
        self._on_change()

    def failure(self, name: str) -> ProcessFailed | None:
        """Why a worker on trial does not run any more."""
        return self._failures.get(name)

    def accept(self, name: str) -> None:
        """It serves: if it cannot be kept running from now on, the fleet ends."""
        process = self._running.get(name)
        if process is not None:
            process.is_on_trial = False

    def let_leave(self, name: str) -> None:
        """It is about to leave: it is not started again."""
        process = self._running.pop(name, None)
        if process is not None:
            self._leaving[name] = process
            process.let_leave()
            self._on_change()

    async def end(self, name: str, patience_s: float) -> None:
        """Wait so long for its process to end by itself, then stop it; its place is free then."""
        process = self._leaving.get(name)
        if process is None:
            if name not in self._running:
                self._plan.give_back(name)  # unless it has ended, it never began
            return
        try:
            async with asyncio.timeout(patience_s):
                await process.ended()
        except TimeoutError:
            await process.stop()
            await process.ended()

    def _ended(self, process: SupervisedProcess) -> None:
        """A worker has left, or failed on trial: in either case it is not started again."""
        name = process.spec.name
        if process.is_on_trial:
            self._failures[name] = process.failure or ProcessFailed(name, "it has left")
        self._rank.remove(process)
        for table in (self._running, self._leaving):
            if table.get(name) is process:
                del table[name]
        self._plan.give_back(name)
        self._on_change()
