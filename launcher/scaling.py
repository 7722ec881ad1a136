"""Adding, draining and restarting workers of a fleet that serves: what each step waits for.

How a worker's process is started and ended is a launcher's own: see `WorkerProcesses`.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    ProcessFailed,
    SettingsError,
)
from rolloutbus.bus.wire.messages.control import FleetStatus, Shutdown
from rolloutbus.launcher.settings import check_not_too_many
from rolloutbus.trainer_adapter.client.client import RolloutClient, settings_for

T = TypeVar("T")

DRAIN_S = 120.0
"""What a leaving worker runs may take so long; then it goes on elsewhere, with its tokens."""
FAREWELL_S = 10.0
"""A worker that has drained leaves by itself: its clients acknowledge the last results first."""
STOP_S = 5.0
"""For the order to a worker that has not drained in time to end what it runs."""
LOOK_S = 0.1
"""Between two looks at the router's table: it tells clients of states, not of reasons."""


class WorkerPlace(msgspec.Struct, frozen=True):
    """What makes one worker differ from the others of its fleet; kept over its restarts."""

    name: str
    number: int
    gpus: tuple[int, ...] = ()
    """As the launcher's process numbers them; empty: what its engine takes by itself."""
    env: Mapping[str, str] = {}
    """Variables of its environment, beside those that all have."""


class WorkerProcesses(Protocol):
    """What scaling asks of a launcher; only `end` waits."""

    @property
    def address(self) -> str:
        """Where clients connect."""
        ...

    @property
    def key_file(self) -> str:
        """Key of an admin; empty where no keys are asked for."""
        ...

    @property
    def worker_names(self) -> list[str]:
        """Workers that are to run, in the order in which they came; not those that leave."""
        ...

    def take_places(
        self, n: int, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> list[WorkerPlace]:
        """Names for so many more workers; SettingsError, and none taken, if there is no room."""
        ...

    def place_of(self, name: str) -> WorkerPlace:
        """The place of a worker that is to run; SettingsError, naming those there are, if none."""
        ...

    def begin(self, place: WorkerPlace) -> None:
        """Start a worker on trial: if it cannot be kept running, that is its `failure` alone.

        The place was taken just now, or was that of a worker which has ended.
        """
        ...

    def failure(self, name: str) -> ProcessFailed | None:
        """Why a worker on trial does not run any more."""
        ...

    def accept(self, name: str) -> None:
        """It serves: it is kept running like all others from now on."""
        ...

    def let_leave(self, name: str) -> None:
        """It is about to leave: do not start it again."""
        ...

    async def end(self, name: str, patience_s: float) -> None:
        """Wait so long for its process to end by itself, then stop it; its place is free then."""
        ...


Tell = Callable[[str, str], None]
"""(worker, what happens to it): one step, for people."""


class Scaling:
    """One change of a fleet's workers at a time; each can be cancelled."""

    def __init__(self, processes: WorkerProcesses, tell: Tell, start_timeout_s: float) -> None:
        self._processes = processes
        self._tell = tell
        self._start_timeout_s = start_timeout_s
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self._going_on: set[asyncio.Task[Any]] = set()
        """What is carried through although its caller may have given it up."""

    async def close(self) -> None:
        """End what is under way: its callers get ActorStopped."""
        self._closed.set()
        for task in self._going_on:
            task.cancel()
        await asyncio.gather(*self._going_on, return_exceptions=True)

    async def scale(self, workers: int, drain_s: float) -> None:
        """See `Fleet.scale`."""
        check_drain(drain_s)
        if workers < 1:
            raise SettingsError("workers: at least 1 is needed; leave the fleet to end it")
        check_not_too_many(workers)
        await self._in_turn(self._scale(workers, drain_s))

    async def add(self, gpus: Sequence[int], env: Mapping[str, str] | None) -> str:
        """See `Fleet.add_worker`."""

        async def added() -> str:
            (place,) = self._processes.take_places(1, gpus=gpus, env=env)
            await self._add([place])
            return place.name

        return await self._in_turn(added())

    async def remove(self, name: str, drain_s: float) -> None:
        """See `Fleet.remove_worker`."""
        check_drain(drain_s)

        async def removed() -> None:
            self._processes.place_of(name)
            if len(self._processes.worker_names) == 1:
                raise SettingsError(f"{name} is the last worker: leave the fleet to end it")
            await asyncio.shield(self._leaving([name], drain_s))

        await self._in_turn(removed())

    async def restart(self, name: str, drain_s: float) -> None:
        """See `Fleet.restart`."""
        check_drain(drain_s)

        async def restarted() -> None:
            place = self._processes.place_of(name)
            leaving = self._leaving([name], drain_s, comes_back=True)
            try:
                await asyncio.shield(leaving)
                await self._add([place])
            except BusError:
                await self._forget(name)
                raise
            except asyncio.CancelledError:
                if not self._closed.is_set():
                    self._go_on(self._forget_once_gone(name, leaving))
                raise

        await self._in_turn(restarted())

    async def _scale(self, workers: int, drain_s: float) -> None:
        names = self._processes.worker_names
        if workers > len(names):
            await self._add(self._processes.take_places(workers - len(names)))
        elif workers < len(names):
            await asyncio.shield(self._leaving(names[workers:], drain_s))

    async def _in_turn(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change when those before it are done; ActorStopped if the fleet ends meanwhile."""

        async def made() -> T:
            async with self._turn:
                return await change

        making = asyncio.ensure_future(made())
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({making, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not making.done() or making.cancelled():
                raise ActorStopped("the fleet has ended, and its workers with it")
            return making.result()
        finally:
            closed.cancel()
            making.cancel()
            await asyncio.wait({making})
            change.close()  # it may not have begun
            if not making.cancelled():
                making.exception()  # it is the caller's, unless the fleet's end came first

    async def _add(self, places: Sequence[WorkerPlace]) -> None:
        """Start workers side by side, and wait until they serve; ends those that do not."""
        waiting = {place.name: place for place in places}
        failures: list[BusError] = []
        try:
            for place in places:
                self._processes.begin(place)
            async with self._client() as client, asyncio.timeout(self._start_timeout_s):
                await self._accept_those_that_serve(client, waiting, failures)
                while waiting:
                    await asyncio.sleep(LOOK_S)
                    await self._accept_those_that_serve(client, waiting, failures)
        except TimeoutError:
            late = ", ".join(waiting)
            failures.append(DeadlineExceeded(f"not serving in {self._start_timeout_s:g} s: {late}"))
        finally:
            await asyncio.gather(*(self._give_up(name) for name in waiting))
        if failures:
            raise failures[0]

    async def _accept_those_that_serve(
        self, client: RolloutClient, waiting: dict[str, WorkerPlace], failures: list[BusError]
    ) -> None:
        status = await _status(client)
        for name in list(waiting):
            failure = self._processes.failure(name)
            if failure is not None:
                del waiting[name]
                failures.append(failure)
                await self._give_up(name)
            elif status is not None and serves(status, name):
                del waiting[name]
                self._processes.accept(name)
                (worker,) = (each for each in status.workers if each.name == name)
                self._tell(name, f"serves version {worker.version} of policy {worker.policy}")

    async def _give_up(self, name: str) -> None:
        self._tell(name, "does not serve, and is ended")
        self._processes.let_leave(name)
        await self._processes.end(name, 0.0)

    def _leaving(
        self, names: Sequence[str], drain_s: float, *, comes_back: bool = False
    ) -> asyncio.Task[None]:
        """Let workers finish what they run, side by side, and end them.

        They leave also if nobody waits for it any more: those that were told cannot be asked back.
        """
        for name in names:
            self._processes.let_leave(name)
            self._tell(name, "drains: it finishes what it runs")
        return self._go_on(
            self._leave_side_by_side(names, Shutdown(comes_back=comes_back), drain_s)
        )

    def _go_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task

    async def _leave_side_by_side(
        self, names: Sequence[str], order: Shutdown, drain_s: float
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client: RolloutClient | None = None
            with contextlib.suppress(BusError):  # no router: none can be told, and each is stopped
                client = await stack.enter_async_context(self._client())
            await asyncio.gather(*(self._leave(client, name, order, drain_s) for name in names))

    async def _leave(
        self, client: RolloutClient | None, name: str, order: Shutdown, drain_s: float
    ) -> None:
        patience_s = FAREWELL_S
        if not await _told_to_leave(client, name, order, drain_s):
            if name in self._processes.worker_names:  # it has died, and its name was given again
                return
            self._tell(name, f"died, or needs more than {drain_s:g} s: its work goes on elsewhere")
            # It ends what it runs, if it can still be told; and if not, nobody expects it back.
            is_told = await _told_to_leave(client, name, replace(order, drain=False), STOP_S)
            patience_s = FAREWELL_S if is_told else 0.0
        await self._processes.end(name, patience_s)
        self._tell(name, "has left")

    async def _forget(self, name: str) -> None:
        """Have the router expect a worker no more that was to come back, and does not."""
        with contextlib.suppress(BusError):  # the next router expects those that are to run then
            async with self._client() as client:
                await _told_to_leave(client, name, Shutdown(drain=False), STOP_S)

    async def _forget_once_gone(self, name: str, leaving: asyncio.Task[None]) -> None:
        await asyncio.wait({leaving})
        async with self._turn:
            if name not in self._processes.worker_names:  # else it was started again after all
                await self._forget(name)

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncGenerator[RolloutClient]:
        processes = self._processes
        settings = settings_for(processes.address, "", processes.key_file)
        async with RolloutClient(settings) as client:
            yield client


def check_drain(drain_s: float) -> None:
    """SettingsError unless a worker can be given so many seconds."""
    if not 0 < drain_s < math.inf:
        raise SettingsError(f"drain_s: {drain_s} is not above 0 and finite")


def serves(status: FleetStatus, name: str) -> bool:
    """Whether a worker has all that is committed, and takes requests unless a client paused it."""
    worker = next((each for each in status.workers if each.name == name), None)
    if status.recovering:  # it may have yet to learn what is committed
        return False
    if worker is None or worker.version < status.committed.get(worker.policy, 0):
        return False
    reasons = worker.blocked_by.keys()
    is_held = "paused" in reasons and reasons <= {"paused", "not_ready"}
    return worker.state != "joining" and (not reasons or is_held)


async def _status(client: RolloutClient) -> FleetStatus | None:
    """The router's table; None if it does not answer now."""
    try:
        return await client.status()
    except BusError:
        return None


async def _told_to_leave(
    client: RolloutClient | None, name: str, order: Shutdown, deadline_s: float
) -> bool:
    """Whether a worker was told to leave, and has ended what it ran."""
    if client is None:
        return False
    try:
        result = await client.shutdown_worker(
            name,
            drain=order.drain,
            comes_back=order.comes_back,
            deadline_s=deadline_s,
            check=False,
        )
    except BusError:
        return False
    return bool(result.by_worker) and not result.errors
