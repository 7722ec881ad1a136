"""The processes that ask: started, killed, started again, and at last told to finish.

A tenth of the clients live in a process that may be killed, and so does the trainer; what such a
process does after its death it does under the same names.
"""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.supervisor import (
    EventHandler,
    ProcessEvent,
    RestartRule,
    SupervisedProcess,
    Supervisor,
)
from rolloutbus.launcher.plan import environment, python
from tests.drills.chaos.settings import ChaosSettings, LoadSettings, TrainerSettings

TRAINER = "trainer"
MORTALS = "mortals"
MORTAL_SHARE = 0.1
DETACHED_SHARE = 0.5
"""Of the requests of those that may be killed."""
DRAIN_GRACE_S = 20.0
READY_TIMEOUT_S = 180.0
UPDATE_DEADLINE_S = 30.0
UNLIMITED = 1_000_000


@dataclass(slots=True)
class Record:
    """The file of one process from its start to its death."""

    path: Path
    process: str
    was_killed: bool = False


class Crowd:
    """Clients and a trainer; an async context manager that leaves no process behind."""

    def __init__(
        self,
        settings: ChaosSettings,
        directory: Path,
        endpoints: Mapping[str, str],
        prompts: Sequence[Sequence[int]],
        on_event: EventHandler,
    ) -> None:
        """`endpoints`: client -> where it connects."""
        self._settings = settings
        self._directory = directory
        self._endpoints = endpoints
        self._prompts = [list(prompt) for prompt in prompts]
        self._on_event = on_event
        self._supervisor = Supervisor(RestartRule(UNLIMITED, max_s=0.5), self._heard)
        self._processes: dict[str, SupervisedProcess] = {}
        self._lives: Counter[str] = Counter()
        self._groups = _groups(settings.client_processes, list(endpoints))
        self._trainer_address = ""
        self.records: list[Record] = []
        """Of all processes that ever ran."""

    async def __aenter__(self) -> Self:
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        await self._supervisor.__aexit__(None, None, None)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; 0 while one is being started again."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def mortals(self) -> list[str]:
        """Processes that may be killed."""
        return [name for name in self._processes if name in (MORTALS, TRAINER)]

    async def start(self, address: str) -> None:
        """Start everybody, the trainer at `address`; returns when all are connected.

        Raises:
            DeadlineExceeded: one was not in time.
        """
        self._trainer_address = address
        names = list(self._groups)
        if self._has_trainer:
            names.append(TRAINER)
        processes = self._supervisor.start(*map(self._spec, names))
        self._processes = dict(zip(names, processes, strict=True))
        await self._supervisor.wait_ready(READY_TIMEOUT_S)

    def kill(self, name: str) -> None:
        """SIGKILL one; its next life begins at once."""
        self._last_record(name).was_killed = True
        self._processes[name].kill()

    async def drain(self) -> None:
        """Tell all to ask no more; returns when they have their last answers.

        One that takes too long is killed: what it still waits for is then lost in its history.
        """
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    @property
    def _has_trainer(self) -> bool:
        # The oracle of a real model knows the weights that it started with, and no others.
        is_fake = self._settings.engine == "fake"
        return is_fake and importlib.util.find_spec("torch") is not None

    def _heard(self, event: ProcessEvent) -> None:
        if event.kind == "died":
            self._lives[event.name] += 1
            self._processes[event.name].spec = self._spec(event.name)
        self._on_event(event)

    def _last_record(self, name: str) -> Record:
        return next(each for each in reversed(self.records) if each.process == name)

    def _spec(self, name: str) -> ProcessSpec:
        path = self._directory / f"{name}.{self._lives[name]}.jsonl"
        self.records.append(Record(path, name))
        is_trainer = name == TRAINER
        settings = self._trainer(path) if is_trainer else self._load(name, path)
        file = path.with_suffix(".json")
        file.write_bytes(msgspec.json.encode(settings))
        module = "tests.drills.chaos.trainer" if is_trainer else "tests.drills.chaos.clients"
        grace_s = self._settings.deadline_s + DRAIN_GRACE_S
        command = [*python(module), "--settings-file", str(file)]
        log = self._directory / f"{name}.log"
        return ProcessSpec(name, command, log, environment(), grace_s=grace_s)

    def _trainer(self, path: Path) -> TrainerSettings:
        return TrainerSettings(
            seed=self._settings.seed,
            life=self._lives[TRAINER],
            endpoint=self._trainer_address,
            history=str(path),
            every_s=self._settings.update_every_s,
            deadline_s=UPDATE_DEADLINE_S,
        )

    def _load(self, name: str, path: Path) -> LoadSettings:
        settings = self._settings
        per_client, rest = divmod(settings.open_requests, len(self._endpoints))
        first = set(list(self._endpoints)[:rest])
        clients = self._groups[name]
        leaves_work = settings.has_detached and name == MORTALS
        return LoadSettings(
            seed=settings.seed,
            life=self._lives[name],
            endpoints={client: self._endpoints[client] for client in clients},
            lanes={client: per_client + (client in first) for client in clients},
            history=str(path),
            deadline_s=settings.deadline_s,
            max_tokens=settings.max_tokens,
            detached_share=DETACHED_SHARE if leaves_work else 0.0,
            prompts=self._prompts,
        )


def _groups(n_processes: int, clients: list[str]) -> dict[str, list[str]]:
    """Process -> its clients: the last tenth may die, the others are dealt out."""
    n_mortals = max(1, round(MORTAL_SHARE * len(clients))) if len(clients) > 1 else 0
    steady, mortals = clients[: len(clients) - n_mortals], clients[len(clients) - n_mortals :]
    n_processes = min(n_processes, len(steady))
    groups = {f"clients-{i}": steady[i::n_processes] for i in range(n_processes)}
    return {**groups, MORTALS: mortals} if mortals else groups
