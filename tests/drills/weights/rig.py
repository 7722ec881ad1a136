"""A fleet with links that can be held, clients that always ask, a trainer that takes orders."""

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.supervisor import ProcessEvent, RestartRule, SupervisedProcess, Supervisor
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.launcher.fleet import Fleet
from rolloutbus.launcher.plan import LEDGER, ROUTER, STORE, environment, python
from rolloutbus.launcher.settings import FleetSettings
from tests.drills.chaos.proxy import ProxyLink
from tests.drills.chaos.settings import LoadSettings
from tests.drills.weights.cases import Victim
from tests.drills.weights.gates import Gates
from tests.drills.weights.orders import TrainerSettings
from tests.drills.weights.settings import WeightDrillSettings
from tests.drills.weights.trainer_process import TrainerProcess

READY_TIMEOUT_S = 120.0
DRAIN_GRACE_S = 20.0
UNLIMITED = 1_000_000
STEP_S = 0.02
MAX_TOKENS = 60
CLIENT = "c0"


class WeightRig:
    """Everything that a run needs; an async context manager."""

    def __init__(self, settings: WeightDrillSettings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._stack = AsyncExitStack()
        workers = [f"w{number}" for number in range(settings.workers)]
        self._links = {name: ProxyLink() for name in (*workers, STORE)}
        self._expected_deaths: Counter[str] = Counter()
        self._n_trainers = 0
        self._trainer: TrainerProcess | None = None
        self._clients: SupervisedProcess | None = None
        self.weights_dir = directory / "weights"
        self.surprises: list[str] = []
        """Deaths of processes that nobody had killed."""
        self.fleet = Fleet(
            FleetSettings(
                workers=settings.workers,
                engine="fake",
                engine_options={"slots": 32, "step_s": STEP_S},
                transport="tcp",
                weights_dir=self.weights_dir,
                run_dir=directory / "fleet",
                keep_logs=True,
                host=HostSettings(max_crashes=UNLIMITED),
            ),
            self._heard,
            restarts=RestartRule(max_deaths=UNLIMITED, max_s=0.1),
            wiring=self._wire,
        )
        self.gates = Gates(self.fleet, self._links)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for link in self._links.values():
                await stack.enter_async_context(link)
            await stack.enter_async_context(self.fleet)
            supervisor = await stack.enter_async_context(Supervisor(on_event=self._heard))
            [self._clients] = supervisor.start(self._load())
            await supervisor.wait_ready(READY_TIMEOUT_S)
            await self.start_trainer()
            stack.push_async_callback(self._end_trainer)
            # Whatever is frozen could not be ended.
            stack.callback(self.gates.open_all)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def trainer(self) -> TrainerProcess:
        """The one that lives."""
        assert self._trainer is not None
        return self._trainer

    @property
    def ledger(self) -> Path:
        """Of the store."""
        return self.weights_dir / LEDGER / "versions.ledger"

    @property
    def load_history(self) -> Path:
        """What the clients saw."""
        return self._directory / "clients.jsonl"

    @property
    def trainer_histories(self) -> list[Path]:
        """What the trainers knew, each life by itself."""
        return [self._directory / f"trainer.{life}.jsonl" for life in range(self._n_trainers)]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, as far as they run."""
        hosts = {f"{name}.host": self.fleet.host_pids(name) for name in self.fleet.worker_names}
        clients = self._clients.pid if self._clients is not None else 0
        found = {name: pids[0] for name, pids in hosts.items() if pids}
        return {**self.fleet.pids, **found, "trainer": self.trainer.pid, "clients": clients}

    async def start_trainer(self) -> None:
        """The next life of the trainer; returns when it is connected."""
        await self._end_trainer()
        settings = TrainerSettings(
            endpoint=self.fleet.address,
            history=str(self._directory / f"trainer.{self._n_trainers}.jsonl"),
            deadline_s=self._settings.update_deadline_s,
        )
        self._n_trainers += 1
        self._trainer = TrainerProcess(settings, self._directory / "trainer.log")
        await self._trainer.__aenter__()
        await self._trainer.ready(READY_TIMEOUT_S)

    async def kill(self, victim: Victim, worker: str) -> None:
        """SIGKILL one party; `worker` is the one meant, if any is."""
        match victim:
            case "trainer":
                await self.trainer.kill()
            case "store":
                self._expected_deaths[STORE] += 1
                self.fleet.kill_store()
            case "router":
                self._expected_deaths[ROUTER] += 1
                self.fleet.kill_router()
            case "worker":
                self._expected_deaths[worker] += 1
                self.fleet.kill(worker)
            case "host":
                self.fleet.kill_engine_host(worker)

    async def drain(self) -> None:
        """Tell the clients to ask no more; returns when they have their last answers."""
        assert self._clients is not None
        await self._clients.stop()

    async def _end_trainer(self) -> None:
        if self._trainer is not None:
            await self._trainer.__aexit__(None, None, None)
            self._trainer = None

    def _load(self) -> ProcessSpec:
        settings = LoadSettings(
            seed=self._settings.seed,
            endpoints={CLIENT: self.fleet.address},
            lanes={CLIENT: self._settings.open_requests},
            history=str(self.load_history),
            deadline_s=self._settings.deadline_s,
            max_tokens=MAX_TOKENS,
        )
        file = self._directory / "clients.json"
        file.write_bytes(msgspec.json.encode(settings))
        command = [*python("tests.drills.chaos.clients"), "--settings-file", str(file)]
        grace_s = self._settings.deadline_s + DRAIN_GRACE_S
        log = self._directory / "clients.log"
        return ProcessSpec("clients", command, log, environment(), grace_s=grace_s)

    def _heard(self, event: ProcessEvent) -> None:
        if event.kind == "died" and self._expected_deaths[event.name] > 0:
            self._expected_deaths[event.name] -= 1
        elif event.kind in ("died", "left"):
            self.surprises.append(f"{event.name} {event.what}")

    def _wire(self, name: str, backend: str) -> str:
        self._links[name].upstream = backend
        return self._links[name].endpoint
