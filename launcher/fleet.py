"""A router, a weight store and workers as processes that this one supervises."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self, TypeVar, Unpack, assert_never

from rolloutbus.bus.actor.child import Program
from rolloutbus.bus.actor.supervisor import (
    EventHandler,
    ProcessEvent,
    RestartRule,
    SupervisedProcess,
    Supervisor,
)
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    DeadlineExceeded,
    SettingsError,
    cannot_be_pickled,
)
from rolloutbus.launcher.control_socket import CONTROL, ControlSocket, Order, Restart, Scale, Tell
from rolloutbus.launcher.discovery import Registration
from rolloutbus.launcher.engine_python import check_python
from rolloutbus.launcher.plain_block import PlainBlock
from rolloutbus.launcher.plan import ROUTER, STORE, FleetPlan, environment
from rolloutbus.launcher.preconditions import check_preconditions
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.scaling import DRAIN_S, Scaling
from rolloutbus.launcher.settings import FleetSettings, UpOptions, packages_of
from rolloutbus.launcher.supervised_workers import SupervisedWorkers, WorkerPlan
from rolloutbus.launcher.ticket import Ticket


def children_of(pid: int) -> list[int]:
    """Process ids of the living children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # or this thread of it
                found += map(int, (thread / "children").read_text().split())
    return found


def command_of(pid: int) -> list[str]:
    """Its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


HOST_MODULE = "rolloutbus.engine_worker.host"
NOT_RUNNING = "the fleet does not run: use it inside of its `async with` or `with`"

T = TypeVar("T")

Wiring = Callable[[str, str], str]
"""(name of a worker or the store, the router's backend) -> address where it joins."""


class Plan(WorkerPlan, Protocol):
    """What a fleet consists of; the programs of `FleetPlan`, wherever they run."""

    @property
    def ready_timeout_s(self) -> float: ...  # noqa: D102 - as of `FleetPlan`
    def router(self, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def standby(self, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def recorder(self, router: str) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def store(self, backend: str, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`
    def gateway(self, router: str, endpoints: dict[str, str] | None = None) -> Program: ...  # noqa: D102 - as of `FleetPlan`


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
        self._listeners: list[EventHandler] = []
        """Of commands that change the workers, beside `on_event`."""
        self._supervisor = Supervisor(restarts, self._heard)
        self._routers: list[SupervisedProcess] = []
        """The first one, and its standby if there is one; empty before they listen."""
        self._store: SupervisedProcess | None = None
        self._gateway: SupervisedProcess | None = None
        self._recorder: SupervisedProcess | None = None
        self._workers: SupervisedWorkers | None = None
        self._scaling: Scaling | None = None
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
        if self._settings.launcher is None:  # else they are on the nodes of the cluster
            await asyncio.to_thread(check_preconditions, self._settings)
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
            await stack.enter_async_context(self._changes())
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
        """Endpoint for clients; with a standby both, separated by a comma."""
        return self._listens("frontend")

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
        """Endpoint for workers that join; with a standby both, separated by a comma."""
        return self._listens("backend")

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers that are to run, running or not."""
        return self._workers.worker_names if self._workers else []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, recorder and gateway included; 0 while one starts again."""
        return {each.spec.name: each.pid for each in self._processes()}

    @property
    def nodes(self) -> dict[str, str]:
        """Ray's ids of the nodes by name; empty without Ray, or while one has no place."""
        return {each.spec.name: each.node for each in self._processes()}

    @property
    def waits_for(self) -> dict[str, str]:
        """What processes that do not serve yet are doing, by name: `{"w1": "loading weights"}`."""
        return self._supervisor.waits_for

    async def scale(self, workers: int, *, drain_s: float = DRAIN_S) -> None:
        """Have so many workers; returns when the new ones serve, or the others are gone.

        New ones have the lowest free numbers, and serve once they have the committed weights. Those
        with the highest numbers go: they take nothing new and finish what they run. Changes of one
        fleet wait for each other. Cancelled, new workers that do not serve yet are ended again;
        those that drain go on to leave.

        Args:
            workers: how many, at least 1.
            drain_s: seconds that a worker's requests may still take; then they go on elsewhere.

        Raises:
            SettingsError: it cannot be: too few, or no GPUs are left. Nothing has changed.
            ProcessFailed: a new worker cannot be kept running; those that serve stay.
            DeadlineExceeded: one does not serve within `start_timeout_s`; those that serve stay.
            ActorStopped: the fleet has ended, or has not begun.
        """
        await self._changing.scale(workers, drain_s)

    async def add_worker(
        self, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> str:
        """Add one worker; returns its name when it serves. Raises as `scale`.

        Args:
            gpus: that its engine sees, as this process numbers them; empty: see `FleetSettings`.
            env: variables of its environment, beside those of the fleet's workers.
        """
        return await self._changing.add(gpus, env)

    async def remove_worker(self, name: str, *, drain_s: float = DRAIN_S) -> None:
        """Drain one worker, and end it; returns when it is gone. Raises as `scale`."""
        await self._changing.remove(name, drain_s)

    async def restart(self, name: str, *, drain_s: float = DRAIN_S) -> None:
        """Drain a worker, end it and start it again, with its GPUs and environment.

        Returns when it serves. Raises as `scale`; a worker that does not come back is gone, and so
        is one whose restart is cancelled while it drains.
        """
        await self._changing.restart(name, drain_s)

    def wait_for(self, change: Coroutine[Any, Any, T]) -> T:
        """In a plain `with`: carry a change out, as in `fleet.wait_for(fleet.scale(8))`."""
        if self._plain is None:
            change.close()
            raise ActorStopped("only a fleet of a plain `with` waits; in `async with` say `await`")
        return self._plain.wait(change)

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
        """SIGKILL the first router; it is started again at the same address. A drill."""
        for router in self._routers[:1]:
            router.kill()

    def kill_store(self) -> None:
        """SIGKILL the weight store; it is started again. A drill."""
        if self._store is not None:
            self._store.kill()

    @property
    def _changing(self) -> Scaling:
        if self._scaling is None:
            raise ActorStopped(NOT_RUNNING)
        return self._scaling

    def _heard(self, event: ProcessEvent) -> None:
        if event.kind == "ready" and event.name == ROUTER and self._is_announced:
            with self._told_if_full():
                self._announce()  # a router may come back with another key
        for listener in (self._on_event, *self._listeners):
            listener(event)

    def _listens(self, what: str) -> str:
        return ",".join(each.endpoints[what] for each in self._routers)

    def _processes(self) -> list[SupervisedProcess]:
        workers = self._workers.processes if self._workers else []
        found = [*self._routers, self._recorder, self._store, self._gateway, *workers]
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

    @contextlib.contextmanager
    def _told_if_full(self) -> Generator[None]:
        """Inside, a note is written: if the disk has no room for it, the fleet runs on."""
        try:
            yield
        except OSError as error:
            why = f"what runs now could not be noted for other commands and the router: {error}"
            self._on_event(ProcessEvent(self.name, "told", why))

    def _announce(self) -> None:
        control = str(self.run_dir / CONTROL)
        self._registration.announce(self.address, self.key_file, control)
        self._is_announced = True

    async def _start(self, plan: Plan) -> None:
        [router] = self._supervisor.start(plan.router())
        standbys = self._supervisor.start(plan.standby()) if self._settings.standby else []
        await self._supervisor.wait_ready(plan.ready_timeout_s)
        self._routers = [router, *standbys]

        def expect() -> None:
            """A router that is started again expects those that are to run now."""
            router.spec = plan.router(router.endpoints)
            for each in standbys:
                each.spec = plan.standby(each.endpoints)

        expect()
        if self._settings.record:
            [self._recorder] = self._supervisor.start(plan.recorder(self.address))
            await self._supervisor.wait_ready(plan.ready_timeout_s)
        where = self._wiring(STORE, self.backend)
        if self._settings.store:
            [self._store] = self._supervisor.start(plan.store(where))

        def changed() -> None:
            with self._told_if_full():
                expect()
                if self._scaling is not None:
                    self._registration.resized(len(self.worker_names))

        self._workers = SupervisedWorkers(
            self._supervisor,
            plan,
            lambda: self.address,
            lambda name: self._wiring(name, self.backend),
            changed,
        )
        self._workers.start_first()
        try:
            await self._supervisor.wait_ready(self._settings.start_timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"{error}; if it needs longer, raise start_timeout_s (--start-timeout)"
            ) from None
        if self._store is not None:
            self._store.spec = plan.store(where, self._store.endpoints)
        if self._settings.http is not None:
            [self._gateway] = self._supervisor.start(plan.gateway(self.address))
            await self._supervisor.wait_ready(self._settings.start_timeout_s)
            self._gateway.spec = plan.gateway(self.address, self._gateway.endpoints)

    @contextlib.asynccontextmanager
    async def _changes(self) -> AsyncGenerator[None]:
        """Inside, workers can be added and removed, also by other processes of this user."""
        assert self._workers is not None, "it was started"

        def tell(name: str, what: str) -> None:
            self._heard(ProcessEvent(name, "scaled", what))

        scaling = Scaling(self._workers, tell, self._settings.start_timeout_s)
        async with ControlSocket(self.run_dir / CONTROL, self._carry_out):
            self._scaling = scaling
            try:
                yield
            finally:
                self._scaling = None
                await scaling.close()

    async def _carry_out(self, order: Order, tell: Tell) -> list[str]:
        """Do what a command asks for."""

        def heard(event: ProcessEvent) -> None:
            tell(event.name, event.what)

        self._listeners.append(heard)
        try:
            match order:
                case Scale(workers, drain_s):
                    await self.scale(workers, drain_s=drain_s)
                case Restart(worker, drain_s):
                    await self.restart(worker, drain_s=drain_s)
                case _:
                    assert_never(order)
        finally:
            self._listeners.remove(heard)
        return self.worker_names

    def _worker(self, name: str) -> SupervisedProcess:
        if self._workers is None:
            raise ActorStopped(NOT_RUNNING)
        return self._workers.named(name)


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
