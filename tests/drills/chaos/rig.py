"""A fleet behind proxies, a crowd of clients, and the hand that breaks them."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from rolloutbus.bus.actor.child import last_lines
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.actor.supervisor import ProcessEvent, RestartRule
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.launcher.fleet import Fleet
from rolloutbus.launcher.plan import ROUTER
from rolloutbus.launcher.settings import FleetSettings
from tests.drills.chaos.crowd import Crowd
from tests.drills.chaos.proxy import ProxyLink
from tests.drills.chaos.recovery import Struck
from tests.drills.chaos.schedule import ROUTER_KINDS, Fault
from tests.drills.chaos.settings import ChaosSettings

FAKE_SLOTS = 256
TRANSFORMERS_OPTIONS: dict[str, float] = {
    "threads": 1, "slots": 16, "kv_tokens": 16_384, "max_context": 256,
}  # fmt: skip
HOST_RESTART_S = 2.0
"""A worker whose engine host was killed is left alone for so long."""
MIN_FIT = 2
"""Workers that are left in peace, if there are so many."""
UNLIMITED = 1_000_000
LAST_WORDS = 5
"""Lines of the log of a process that died by itself."""
DEADLY = frozenset({"kill_worker", "kill_router", "kill_client"})
"""Faults that a supervisor hears of."""


class Rig:
    """Everything that a run needs; an async context manager."""

    def __init__(
        self,
        settings: ChaosSettings,
        directory: Path,
        prompts: Sequence[Sequence[int]] = (),
        on_event: Callable[[ProcessEvent], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._logs = directory / "fleet" / "logs"
        self._tell = on_event
        self._clock = BootClock()
        self._stack = AsyncExitStack()
        self._frozen: set[int] = set()
        self._troubled: set[str] = set()
        self._is_better = asyncio.Event()
        self._healings: set[asyncio.TimerHandle] = set()
        self._expected_deaths: Counter[str] = Counter()
        self.struck: list[Struck] = []
        self.surprises: list[str] = []
        """Deaths of processes that nobody had killed."""
        self.workers = [f"w{number}" for number in range(settings.workers)]
        self.clients = [f"c{number}" for number in range(settings.clients)]
        self._links = {name: ProxyLink() for name in (*self.workers, *self.clients)}
        endpoints = {name: self._links[name].endpoint for name in self.clients}
        self.crowd = Crowd(settings, directory, endpoints, prompts, self._heard)
        self.fleet = Fleet(
            FleetSettings(
                workers=settings.workers,
                engine=settings.engine,
                model=settings.model,
                engine_options=_engine_options(settings),
                transport="tcp",
                store=True,
                run_dir=directory / "fleet",
                keep_logs=True,
                host=HostSettings(max_crashes=UNLIMITED),
            ),
            self._heard,
            restarts=RestartRule(max_deaths=UNLIMITED, max_s=0.5),
            wiring=self._wire,
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for link in self._links.values():
                await stack.enter_async_context(link)
            await stack.enter_async_context(self.fleet)
            stack.callback(self.heal_all)
            for name in self.clients:
                self._links[name].upstream = self.fleet.address
            await stack.enter_async_context(self.crowd)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: the fleet's, its engine hosts' and the clients'."""
        hosts = {f"{name}.host": self.fleet.host_pids(name) for name in self.workers}
        return {
            **self.fleet.pids,
            **{name: found[0] for name, found in hosts.items() if found},
            **self.crowd.pids,
        }

    async def strike(self, faults: Iterable[Fault]) -> None:
        """Let these happen now, each to somebody who is well; waits until there are such."""
        for fault in faults:
            victim = await self._fit_victim(fault)
            self._hit(fault, victim)

    def heal_all(self) -> None:
        """Thaw and heal everything at once."""
        for healing in list(self._healings):
            healing.cancel()
        self._healings.clear()
        for pid in list(self._frozen):
            self._thaw([pid])
        for link in self._links.values():
            link.heal()

    async def wait_router_well(self, timeout_s: float) -> None:
        """Wait until the router serves again."""
        await self._until(lambda: ROUTER not in self._troubled, timeout_s)

    async def wait_well(self, timeout_s: float) -> None:
        """Wait until all faults are over and every process serves again."""
        await self._until(lambda: not self._troubled, timeout_s)
        await self.fleet.wait_ready(timeout_s)

    async def _until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                self._is_better.clear()
                await self._is_better.wait()

    def _hit(self, fault: Fault, victim: str) -> None:
        now = self._clock.now()
        self._troubled.add(victim)
        self._expected_deaths[victim] += fault.kind in DEADLY
        self.struck.append(Struck(fault.kind, victim, now, now + fault.duration_s))
        match fault.kind:
            case "kill_worker":
                self.fleet.kill(victim)
            case "kill_router":
                self.fleet.kill_router()
            case "kill_client":
                self.crowd.kill(victim)
            case "kill_host":
                self.fleet.kill_engine_host(victim)
                self._later(HOST_RESTART_S, lambda: self._well(victim))
            case "stop_worker" | "stop_host" | "stop_router":
                is_host = fault.kind == "stop_host"
                pids = self.fleet.host_pids(victim) if is_host else [self.fleet.pids[victim]]
                self._freeze(pids)
                self._later(fault.duration_s, lambda: (self._thaw(pids), self._well(victim)))
            case "partition_worker" | "partition_client":
                self._break_link(self._links[victim], fault)
                link = self._links[victim]
                self._later(fault.duration_s, lambda: (link.heal(), self._well(victim)))

    async def _fit_victim(self, fault: Fault) -> str:
        while True:
            fit = self._fit(fault)
            if fit:
                return fit[fault.target % len(fit)]
            self._is_better.clear()
            await self._is_better.wait()

    def _fit(self, fault: Fault) -> list[str]:
        if fault.kind in ROUTER_KINDS:
            return [ROUTER] if ROUTER not in self._troubled else []
        if fault.kind == "kill_client":
            return [name for name in self.crowd.mortals if name not in self._troubled]
        if fault.kind == "partition_client":
            return [name for name in self.clients if name not in self._troubled]
        fit = [name for name in self.workers if name not in self._troubled]
        return fit if len(fit) > min(MIN_FIT, len(self.workers) - 1) else []

    def _break_link(self, link: ProxyLink, fault: Fault) -> None:
        match fault.cut:
            case "up":
                link.cut("up")
            case "down":
                link.cut("down")
            case "half":
                link.halve()
            case _:
                link.cut()

    def _freeze(self, pids: Iterable[int]) -> None:
        for pid in filter(None, pids):  # 0, of one that is being started, would be our own group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._frozen.add(pid)

    def _thaw(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _later(self, delay_s: float, what: Callable[[], object]) -> None:
        def run() -> None:
            self._healings.discard(handle)
            what()

        handle = asyncio.get_running_loop().call_later(delay_s, run)
        self._healings.add(handle)

    def _well(self, victim: str) -> None:
        self._troubled.discard(victim)
        self._is_better.set()

    def _heard(self, event: ProcessEvent) -> None:
        self._tell(event)
        if event.kind == "died" and self._expected_deaths[event.name] > 0:
            self._expected_deaths[event.name] -= 1
        elif event.kind in ("died", "left"):
            logs = (self._directory / f"{event.name}.log", self._logs / f"{event.name}.log")
            words = [line for log in logs for line in last_lines(log, LAST_WORDS)]
            self.surprises.append(" | ".join([f"{event.name} {event.what}", *words]))
        if event.kind == "ready":
            if event.name == ROUTER:
                self._router_is_back()
            self._well(event.name)

    def _router_is_back(self) -> None:
        last = next(
            (i for i in reversed(range(len(self.struck))) if self.struck[i].kind == "kill_router"),
            None,
        )
        if last is not None:
            old = self.struck[last]
            self.struck[last] = Struck(old.kind, old.victim, old.at, self._clock.now())

    def _wire(self, name: str, backend: str) -> str:
        if name not in self._links:
            return backend
        self._links[name].upstream = backend
        return self._links[name].endpoint


def _engine_options(settings: ChaosSettings) -> dict[str, float]:
    if settings.engine != "fake":
        return TRANSFORMERS_OPTIONS
    return {"slots": FAKE_SLOTS, "step_s": settings.step_s}
