"""A router, a weight store and workers as processes that this one supervises."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import NoReturn, Protocol, Self, Unpack

from rolloutbus.bus.actor.child import Program
from rolloutbus.bus.actor.supervisor import (
    EventHandler,
    ProcessEvent,
    RestartRule,
    SupervisedProcess,
    Supervisor,
)
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import SettingsError, cannot_be_pickled
from rolloutbus.launcher.discovery import Registration
from rolloutbus.launcher.engine_python import check_python
from rolloutbus.launcher.plain_block import PlainBlock
from rolloutbus.launcher.plan import ROUTER, STORE, FleetPlan, environment
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.settings import FleetSettings, UpOptions, packages_of
from rolloutbus.launcher.ticket import Ticket


def children_of(pid: int) -> list[int]:
    """Process ids of the living children of a process."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def command_of(pid: int) -> list[str]:
    """Its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


HOST_MODULE = "rolloutbus.engine_worker.host"

Wiring = Callable[[str, str], str]
"""(name of a worker or the store, the router's backend) -> address where it joins."""


class Plan(Protocol):
    """What a fleet consists of; the programs of `FleetPlan`, wherever they run."""

    @property
    def key_file(self) -> str: ...  # noqa: D102 - as of `FleetPlan`
    @property
    def worker_names(self) -> list[str]: ...  # noqa: D102 - as of `FleetPlan`
    @property
    def ready_timeout_s(self) -> float: ...  # noqa: D102 - as of `FleetPlan`
    def router(self, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def store(self, backend: str, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def gateway(self, router: str, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def worker(self, name: str, backend: str) -> Program: ...  # noqa: D102 - as of `FleetPlan`


def _ignore(_: ProcessEvent) -> None:
    """Default listener: events are not shown."""


def _directly(_: str, backend: str) -> str:
    """Default wiring: workers join the router directly."""
    return backend


@strict()
class Fleet:
    """A running fleet; a context manager, for `async with` and for `with`. See `up`.

    What dies is started again; when something dies too often, the body of the `async with` is
    cancelled and ProcessFailed comes out of it.
    """

    def __init__(
        self,
        settings: FleetSettings,
        on_event: EventHandler = _ignore,
        *,
        restarts: RestartRule | None = None,
        wiring: Wiring = _directly,
    ) -> None:
        self._settings = settings
        self._wiring = wiring
        self._stack = AsyncExitStack()
        self._plain: PlainBlock | None = None
        self._registration = Registration(
            settings.name,
            model=os.fspath(settings.model),
            engine=settings.engine,
            workers=settings.workers,
        )
        self._is_announced = False
        self._on_event = on_event
        self._supervisor = Supervisor(restarts, self._heard)
        self._router: SupervisedProcess | None = None
        self._store: SupervisedProcess | None = None
        self._gateway: SupervisedProcess | None = None
        self._workers: dict[str, SupervisedProcess] = {}
        self.run_dir = Path()
        """Holds sockets and logs while the fleet runs."""
        self.key_file = ""
        """Key of an admin, for `connect`; empty unless the fleet is guarded."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, "its `address`, and connect there")

    async def __aenter__(self) -> Self:
        """Bring everything up; returns when every worker can be asked.

        Raises:
            SettingsError: something cannot work as asked for.
            ProcessFailed: a process cannot be kept running.
            DeadlineExceeded: a worker was not ready in time.
        """
        if self._settings.python and self._settings.launcher is None:
            python, packages = os.fspath(self._settings.python), packages_of(self._settings)
            await asyncio.to_thread(check_python, python, packages, environment())
        async with AsyncExitStack() as stack:
            given = self._settings.run_dir
            run_dir = stack.enter_context(
                RunDirectory(Path(given) if given else None, keep_logs=self._settings.keep_logs)
            )
            self.run_dir = run_dir.path
            stack.enter_context(self._registration)
            plan = await stack.enter_async_context(self._planned(run_dir))
            await stack.enter_async_context(self._supervisor)
            self.key_file = plan.key_file
            await self._start(plan)
            self._announce()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def __enter__(self) -> Self:
        """The same in a plain `with`, for programs without `asyncio`.

        When something dies too often the log tells at once, and leaving the block raises
        ProcessFailed.
        """
        self._plain = PlainBlock(self, f"rolloutbus-fleet-{self.name}")
        self._plain.enter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._plain is not None:
            self._plain.leave()

    @property
    def name(self) -> str:
        """The fleet's name: `rolloutbus status --name NAME`."""
        return self._registration.name

    @property
    def address(self) -> str:
        """Endpoint for clients."""
        return self._router.endpoints["frontend"] if self._router else ""

    @property
    def http(self) -> str:
        """Address of the HTTP gateway; empty if there is none."""
        return self._gateway.endpoints["http"] if self._gateway else ""

    @property
    def ticket(self) -> Ticket:
        """Address and key as one value that pickles, for clients on other machines.

        Raises:
            SettingsError: nothing on another machine can reach this fleet.
        """
        return Ticket.of(self.address, self.key_file)

    @property
    def backend(self) -> str:
        """Endpoint for workers that join."""
        return self._router.endpoints["backend"] if self._router else ""

    @property
    def worker_names(self) -> list[str]:
        """Names of all workers, running or not."""
        return list(self._workers)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: router, store, gateway, workers; 0 while one starts again."""
        return {each.spec.name: each.pid for each in self._processes()}

    @property
    def nodes(self) -> dict[str, str]:
        """Ray's ids of the nodes by name; empty without Ray, or while one has no place."""
        return {each.spec.name: each.node for each in self._processes()}

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every process serves, those killed before included.

        Raises:
            DeadlineExceeded: one did not within `timeout_s` seconds; it names those.
        """
        await self._supervisor.wait_ready(timeout_s)

    def kill(self, name: str) -> None:
        """SIGKILL a worker and its engine host at once; it is started again. A drill."""
        self._worker(name).kill()

    def kill_engine_host(self, name: str) -> None:
        """SIGKILL the engine host of a worker; the worker starts another. A drill."""
        for pid in self.host_pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def host_pids(self, name: str) -> list[int]:
        """The engine hosts of a worker: one, or none while it is being started again.

        Raises:
            SettingsError: the fleet is on Ray, perhaps on other machines.
        """
        if self._settings.launcher is not None:
            raise SettingsError("engine hosts of a fleet on Ray cannot be found from here")
        children = children_of(self._worker(name).pid)
        return [pid for pid in children if HOST_MODULE in command_of(pid)]

    def kill_router(self) -> None:
        """SIGKILL the router; it is started again at the same address. A drill."""
        if self._router is not None:
            self._router.kill()

    def kill_store(self) -> None:
        """SIGKILL the weight store; it is started again. A drill."""
        if self._store is not None:
            self._store.kill()

    def _heard(self, event: ProcessEvent) -> None:
        if event.kind == "ready" and event.name == ROUTER and self._is_announced:
            self._announce()  # a router may come back with another key
        self._on_event(event)

    def _processes(self) -> list[SupervisedProcess]:
        found = [self._router, self._store, self._gateway, *self._workers.values()]
        return [each for each in found if each is not None]

    def _planned(self, run_dir: RunDirectory) -> AbstractAsyncContextManager[Plan]:
        launcher = self._settings.launcher
        if launcher is None:
            return nullcontext(FleetPlan(self._settings, run_dir))
        # Ray is an extra, and takes a second to import.
        from rolloutbus.launcher.on_ray.plan import planned  # noqa: PLC0415

        def tell(sentence: str) -> None:
            self._on_event(ProcessEvent("ray", "told", sentence))

        return planned(launcher, self._settings, run_dir, tell)

    def _announce(self) -> None:
        self._registration.announce(self.address, self.key_file)
        self._is_announced = True

    async def _start(self, plan: Plan) -> None:
        [router] = self._supervisor.start(plan.router())
        await self._supervisor.wait_ready(plan.ready_timeout_s)
        router.spec = plan.router(router.endpoints)
        self._router = router
        where = self._wiring(STORE, self.backend)
        if self._settings.store:
            [self._store] = self._supervisor.start(plan.store(where))
        workers = self._supervisor.start(
            *(plan.worker(name, self._wiring(name, self.backend)) for name in plan.worker_names)
        )
        self._workers = {worker.spec.name: worker for worker in workers}
        await self._supervisor.wait_ready(self._settings.start_timeout_s)
        if self._store is not None:
            self._store.spec = plan.store(where, self._store.endpoints)
        if self._settings.http is not None:
            [self._gateway] = self._supervisor.start(plan.gateway(self.address))
            await self._supervisor.wait_ready(plan.ready_timeout_s)
            self._gateway.spec = plan.gateway(self.address, self._gateway.endpoints)

    def _worker(self, name: str) -> SupervisedProcess:
        worker = self._workers.get(name)
        if worker is None:
            raise SettingsError(f"no worker {name!r}: there are {', '.join(self._workers)}")
        return worker


@strict(options=FleetSettings)
def up(on_event: EventHandler = _ignore, /, **options: Unpack[UpOptions]) -> Fleet:
    """Bring up a router, a weight store and workers; for `async with` or `with`.

    They run on this machine, or on a Ray cluster with `launcher=rolloutbus.RayLauncher()`.

    Args:
        on_event: hears of every start, death and restart of a process.
        options: `model`, `workers`, `engine`, …: see FleetSettings.

    Raises:
        SettingsError: an option has no valid value.
        TypeError: there is no such option; names the nearest one.
    """
    return Fleet(FleetSettings(**options), on_event)
