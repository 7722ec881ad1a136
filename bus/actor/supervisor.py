"""Keeping processes running: restarts with a limit, readiness, and an end in order.

Each call of `Supervisor.start` is a rank. Ranks end in the reverse order of their start, the
processes of one rank side by side. `add` puts one more into a rank.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from rolloutbus.bus.actor.child import Child, Program, how_it_ended, last_lines
from rolloutbus.bus.actor.loop import BootClock, Clock
from rolloutbus.bus.actor.process import ActorExit, complaint_in
from rolloutbus.bus.backoff import wait_after
from rolloutbus.bus.wire.errors import ActorStopped, DeadlineExceeded, ProcessFailed

LOG_LINES = 12
"""Of a failed process's log, shown with its error."""

_HOPELESS = frozenset({ActorExit.SETTINGS, ActorExit.ENGINE})
"""A process that ends so before it was ever ready would only do it again."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """How often a process may die."""

    max_deaths: int = 5
    """More within `window_s` and the supervisor gives up."""
    window_s: float = 60.0
    first_s: float = 0.1
    """Before the first restart; doubles with each death in the window."""
    max_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """Something happened to a process; `what` says it in words."""

    name: str
    kind: "EventKind"
    what: str


EventKind = Literal["started", "ready", "died", "left", "told", "scaled"]
"""`told`: it says something that people must know. `scaled`: a step of adding or removing it."""


EventHandler = Callable[[ProcessEvent], None]


def _ignore(_: ProcessEvent) -> None:
    """Default listener: events are not shown."""


def _nothing() -> None:
    """Default of `on_end`."""


class SupervisedProcess:
    """One program, kept running: what is known of its present incarnation."""

    def __init__(
        self, spec: Program, rule: RestartRule, on_event: EventHandler, clock: Clock
    ) -> None:
        self.spec = spec
        """May be replaced; the next incarnation follows it."""
        self.endpoints: dict[str, str] = {}
        """Where it serves, as announced by the incarnation that was ready last."""
        self._rule = rule
        self._on_event = on_event
        self._clock = clock
        self._child: Child | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._deaths: deque[float] = deque()
        self._doing = ""
        """What the present incarnation has said that it does until it is ready."""
        self._was_ready = False
        self._complaint = ""
        """Why the last incarnation ended, as it said."""
        self._late: asyncio.TimerHandle | None = None
        """Ends an incarnation that is not ready in time."""
        self.is_on_trial = False
        """If it cannot be kept running, that is its own `failure` and ends nothing else."""
        self.failure: ProcessFailed | None = None
        """Why it does not run any more, if that happened on trial."""
        self.on_end: Callable[[], None] = _nothing
        """Called when it does not run, and will not be started again."""
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        return self._child.pid if self._child else 0

    @property
    def node(self) -> str:
        """Its machine, by the name that its launcher knows; empty: this one, or none yet."""
        return self._child.node if self._child else ""

    @property
    def is_ready(self) -> bool:
        """Whether its present incarnation serves."""
        return self._ready.is_set()

    @property
    def waits_for(self) -> str:
        """What it does until it is ready, e.g. `loading weights`; empty: it is ready."""
        return "" if self.is_ready else self._doing or "starting"

    async def wait_ready(self) -> None:
        """Wait until its present or next incarnation serves."""
        await self._ready.wait()

    def kill(self) -> None:
        """SIGKILL it and all that it started: a drill. It is started again."""
        self._ready.clear()
        if self._child is not None:
            self._child.kill()

    async def keep_running(self) -> None:
        """Run the process until `stop`; start it again whenever it dies.

        Raises:
            ProcessFailed: it died too often, or cannot work at all.
        """
        while not self._stopping.is_set():
            status = await self._live()
            if self._stopping.is_set():
                return
            if self._is_final(status):
                self._report("left", self._complaint or how_it_ended(status))
                return
            await self._rest(self._judge(status))

    def let_leave(self) -> None:
        """Do not start it again when it ends, however that is."""
        self._stopping.set()

    async def ended(self) -> None:
        """Wait until it does not run, and will not be started again."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End it and do not start it again."""
        self._stopping.set()
        if self._child is not None:
            await self._child.stop()

    async def kept(self) -> None:
        """`keep_running`, of which a failure on trial is noted and not raised."""
        try:
            await self.keep_running()
        except ProcessFailed as failure:
            if not self.is_on_trial:
                raise
            self.failure = failure
        finally:
            self._ended.set()
        self.on_end()  # not if this task was cancelled: the process may run, and `stop` ends it

    async def _live(self) -> int | None:
        """One incarnation; returns its exit status."""
        self._doing = self._complaint = ""
        try:
            child = await self.spec.start(self._became_ready, self._noticed, self._progressed)
        except OSError as error:
            self._complaint = f"it cannot be started: {error}"
            return ActorExit.SETTINGS
        self._child = child
        self._report("started", f"started as process {child.pid}" if child.pid else "is started")
        if self.spec.ready_timeout_s:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(self.spec.ready_timeout_s, self._kill_late, child)
        try:
            if self._stopping.is_set():
                await child.stop()
            return await child.wait()
        finally:
            self._ready.clear()
            self._in_time()
            # Cancelled while it runs: `stop` still has to end it.
            if child.has_ended:
                self._child = None

    def _kill_late(self, child: Child) -> None:
        self._complaint = self._complaint or (
            f"it was not ready within {self.spec.ready_timeout_s:g} s"
        )
        child.kill()

    def _in_time(self) -> None:
        """Stops the watch for a late start: the process is ready, or has ended."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _became_ready(self, endpoints: dict[str, str]) -> None:
        self._in_time()
        self.endpoints = endpoints
        self._was_ready = True
        self._ready.set()
        self._report("ready", "is ready")

    def _progressed(self, doing: str) -> None:
        self._doing = doing

    def _noticed(self, sentence: str) -> None:
        if complaint := complaint_in([sentence]):
            self._complaint = complaint  # said with its end
        else:
            self._report("told", sentence)

    def _is_final(self, status: int | None) -> bool:
        """Whether it left on purpose, or would only be turned away again."""
        is_turned_away = status in (ActorExit.REPLACED, ActorExit.FORBIDDEN)
        return is_turned_away or (status == ActorExit.STOPPED and self.spec.may_leave)

    def _judge(self, status: int | None) -> float:
        """Count a death; returns the seconds to rest before the next start."""
        if status in _HOPELESS and not self._was_ready:
            raise self._failure(status, "")
        now = self._clock.now()
        self._deaths.append(now)
        while self._deaths[0] < now - self._rule.window_s:
            self._deaths.popleft()
        n_deaths = len(self._deaths)
        if n_deaths > self._rule.max_deaths:
            raise self._failure(status, f", {n_deaths} times in {self._rule.window_s:g} seconds")
        delay_s = wait_after(n_deaths, self._rule.first_s, self._rule.max_s)
        why = how_it_ended(status)
        if self._complaint:
            why += f": {self._complaint}"
        self._report("died", f"{why}; starting it again in {delay_s:g} s")
        return delay_s

    def _failure(self, status: int | None, how_often: str) -> ProcessFailed:
        lines = last_lines(self.spec.log, LOG_LINES)
        message = how_it_ended(status) + how_often
        if complaint := self._complaint or complaint_in(lines):
            return ProcessFailed(self.spec.name, f"{complaint}{how_often}")
        return ProcessFailed(self.spec.name, message, "\n".join(lines))

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _report(self, kind: EventKind, what: str) -> None:
        self._on_event(ProcessEvent(self.spec.name, kind, what))


class Supervisor:
    """Parent of processes. An async context manager: leaving it ends them all.

    When a process cannot be kept running, the body is cancelled and ProcessFailed comes out.
    """

    def __init__(
        self,
        rule: RestartRule | None = None,
        on_event: EventHandler = _ignore,
        clock: Clock | None = None,
    ) -> None:
        self._rule = rule or RestartRule()
        self._on_event = on_event
        self._clock = clock or BootClock()
        self._tasks = asyncio.TaskGroup()
        self._ranks: list[list[SupervisedProcess]] = []
        self._is_closing = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop_all()
            # Without the body's error, which goes on by itself and not in a group.
            await self._tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as group:
            failure = _first_failure(group)
            if failure is None:
                raise
            raise failure from None
        finally:
            for process in self._processes():
                process.kill()

    def start(self, *specs: Program) -> list[SupervisedProcess]:
        """Start one rank of processes; see `SupervisedProcess.wait_ready`."""
        rank = [SupervisedProcess(spec, self._rule, self._on_event, self._clock) for spec in specs]
        self._ranks.append(rank)
        for process in rank:
            self._keep(process)
        return rank

    def add(self, rank: list[SupervisedProcess], spec: Program) -> SupervisedProcess:
        """Start one more process of a rank that `start` returned; it is on trial.

        Raises:
            ActorStopped: all processes are being ended.
        """
        if self._is_closing:
            raise ActorStopped(f"{spec.name} is not started: all processes are being ended")
        process = SupervisedProcess(spec, self._rule, self._on_event, self._clock)
        process.is_on_trial = True
        rank.append(process)
        self._keep(process)
        return process

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every process is ready.

        Raises:
            DeadlineExceeded: one was not within `timeout_s` seconds; it names those.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for process in self._processes():
                    await process.wait_ready()
        except TimeoutError:
            late = ", ".join(each.spec.name for each in self._processes() if not each.is_ready)
            raise DeadlineExceeded(f"not ready within {timeout_s:g} s: {late}") from None

    @property
    def waits_for(self) -> dict[str, str]:
        """What the processes that are not ready do until they are, by name."""
        found = {each.spec.name: each.waits_for for each in self._processes()}
        return {name: doing for name, doing in found.items() if doing}

    def _keep(self, process: SupervisedProcess) -> None:
        self._tasks.create_task(process.kept(), name=f"keep {process.spec.name}")

    def _processes(self) -> list[SupervisedProcess]:
        return [process for rank in self._ranks for process in rank]

    async def _stop_all(self) -> None:
        self._is_closing = True
        for rank in reversed(self._ranks):
            await asyncio.gather(*(process.stop() for process in rank))


def _first_failure(group: BaseExceptionGroup[BaseException]) -> ProcessFailed | None:
    """Returns why the group ended; None if one of its errors is a bug here."""
    failures, others = group.split(ProcessFailed)
    if failures is None or others is not None:
        return None
    first = failures.exceptions[0]
    return first if isinstance(first, ProcessFailed) else None
