"""A router, a weight store and workers as supervised processes of this one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn, Self, Unpack

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
from rolloutbus.launcher.plan import READY_TIMEOUT_S, ROUTER, STORE, FleetPlan, environment
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.settings import FleetSettings, UpOptions, packages_of


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
        self._recorder: SupervisedProcess | None = None
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
        if self._settings.python:
            python, packages = os.fspath(self._settings.python), packages_of(self._settings)
            await asyncio.to_thread(check_python, python, packages, environment())
        async with AsyncExitStack() as stack:
            given = self._settings.run_dir
            run_dir = stack.enter_context(
                RunDirectory(Path(given) if given else None, keep_logs=self._settings.keep_logs)
            )
            self.run_dir = run_dir.path
            stack.enter_context(self._registration)
            await stack.enter_async_context(self._supervisor)
            plan = FleetPlan(self._settings, run_dir)
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
    def backend(self) -> str:
        """Endpoint for workers that join."""
        return self._router.endpoints["backend"] if self._router else ""

    @property
    def worker_names(self) -> list[str]:
        """Names of all workers, running or not."""
        return list(self._workers)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, recorder and gateway included; 0 while one starts again."""
        others = [self._router, self._recorder, self._store, self._gateway]
        processes = [*others, *self._workers.values()]
        return {each.spec.name: each.pid for each in processes if each is not None}

    @property
    def waits_for(self) -> dict[str, str]:
        """What processes that do not serve yet are doing, by name: `{"w1": "loading weights"}`."""
        return self._supervisor.waits_for

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
        """The engine hosts of a worker: one, or none while it is being started again."""
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

    def _announce(self) -> None:
        self._registration.announce(self.address, self.key_file)
        self._is_announced = True

    async def _start(self, plan: FleetPlan) -> None:
        [router] = self._supervisor.start(plan.router())
        await self._supervisor.wait_ready(READY_TIMEOUT_S)
        router.spec = plan.router(router.endpoints)
        self._router = router
        if self._settings.record:
            [self._recorder] = self._supervisor.start(plan.recorder(self.address))
            await self._supervisor.wait_ready(READY_TIMEOUT_S)
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
            await self._supervisor.wait_ready(READY_TIMEOUT_S)
            self._gateway.spec = plan.gateway(self.address, self._gateway.endpoints)

    def _worker(self, name: str) -> SupervisedProcess:
        worker = self._workers.get(name)
        if worker is None:
            raise SettingsError(f"no worker {name!r}: there are {', '.join(self._workers)}")
        return worker


@strict(options=FleetSettings)
def up(on_event: EventHandler = _ignore, /, **options: Unpack[UpOptions]) -> Fleet:
    """Bring up a router, a weight store and workers on this machine; for `async with` or `with`.

    Args:
        on_event: hears of every start, death and restart of a process.
        options: `model`, `workers`, `engine`, …: see FleetSettings.

    Raises:
        SettingsError: an option has no valid value.
        TypeError: there is no such option; names the nearest one.
    """
    return Fleet(FleetSettings(**options), on_event)
