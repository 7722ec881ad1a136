"""One drill of weight updates, from its seed to its report."""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.launcher.plan import LEDGER
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
from tests.drills.chaos.history import judge, lives_of
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.records import read_history, read_publications
from tests.drills.chaos.usage import growths, usages_of
from tests.drills.weights.cases import WAYS, Case, draw_cases
from tests.drills.weights.leftovers import (
    MAX_LISTENING,
    MAX_SEGMENTS,
    held_by,
    n_listening,
    owners_in,
    processes_of,
    unfinished_files,
)
from tests.drills.weights.orders import Order, Told
from tests.drills.weights.report import CaseReport, Report, report
from tests.drills.weights.rig import WeightRig
from tests.drills.weights.settings import WeightDrillSettings

POLICY = "default"
PACE_S = 0.02
"""Between two questions to the router: a status is an answer, not an event."""
RECOVERY_TIMEOUT_S = 180.0
OUTCOME_TIMEOUT_S = 150.0
MAY_WAIT = ("ready", "updating")
"""States of a worker that serves."""
PROBE = SamplingParams(max_new_tokens=2, ignore_eos=True)


async def run_weight_faults(
    settings: WeightDrillSettings, on_progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Kill as the seed says, then judge what clients, trainers and the fleet show.

    Args:
        settings: of the run.
        on_progress: is told of each case when it has ended.

    Raises:
        ProcessFailed: a process could not be kept running.
    """
    cases = draw_cases(settings.seed, settings.first + settings.cases, settings.workers)
    with _directory(settings) as path:
        rig = WeightRig(settings, path)
        reports: list[CaseReport] = []
        async with rig, connect(rig.fleet.address, name="drill") as client:
            drill = Drill(rig, client)
            await drill.warm_up()
            before = usages_of(rig.pids)
            for number, case in enumerate(cases[settings.first :], start=settings.first):
                with _named(f"case {number}, {case}, seed {settings.seed}"):
                    reports.append(await drill.run(number, case))
                on_progress(str(reports[-1]))
            problems = await _lasting(drill.leftovers)
            rig.trainer.forget()
            problems += await _lasting(drill.kept)
            drill.owners |= owners_in(rig.ledger)
            grown = growths(before, usages_of(rig.pids))
            problems += [f"{kind}: {each.problem}" for kind, each in grown.items() if each.problem]
            await rig.drain()
        on_progress("judging")
        still_runs = await _lasting(lambda: processes_of(path))
        problems += [f"still runs: {each}" for each in still_runs]
        still_held = await _lasting(lambda: held_by(drill.owners))
        problems += [f"still in shared memory: {each}" for each in still_held]
        ledger = Ledger()
        for history in rig.trainer_histories:
            ledger.add(read_publications(history))
        lives = lives_of(read_history(rig.load_history))
        problems += rig.surprises
        return report(settings, reports, judge(lives, ledger=ledger), lives.values(), problems)


T = TypeVar("T")


async def _lasting(look: Callable[[], Sequence[T]]) -> list[T]:
    """What is seen and does not go by itself, as an end or a file does that is under way."""
    clock = BootClock()
    give_up_at = clock.now() + RECOVERY_TIMEOUT_S
    while (seen := look()) and clock.now() < give_up_at:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(PACE_S)
    return list(seen)


class Drill:
    """Case after case on one rig."""

    def __init__(self, rig: WeightRig, client: RolloutClient) -> None:
        self._rig = rig
        self._client = client
        self._clock = BootClock()
        self._n_orders = 0
        self.owners: set[str] = set()
        """Of segments, in all lives of the store."""

    async def warm_up(self) -> None:
        """Take every way once: what a process loads for it, it keeps."""
        for transport, mode in WAYS:
            self._n_orders += 1
            order = Order(float(self._n_orders), transport, mode, require="all")
            self._rig.trainer.publish(order)
            await self._rig.trainer.outcome(OUTCOME_TIMEOUT_S)

    async def run(self, number: int, case: Case) -> CaseReport:
        """One update, one death, and the way back."""
        rig = self._rig
        before = await self._served(lambda now: not now.updates)
        self.owners |= owners_in(rig.ledger)
        has_struck = await rig.gates.bring_to(case, rig.trainer, self._order(case))
        worker = rig.fleet.worker_names[case.target]
        struck_at = self._clock.now()
        await rig.kill(case.victim, worker)
        rig.gates.open_all()
        told = rig.trainer.last
        if case.victim == "trainer":
            await rig.start_trainer()
        # The update may still be on its way: who waits for it serves the old version meanwhile.
        await self._served(lambda now: _is_reborn(case, worker, before, now), MAY_WAIT)
        served_s = self._clock.now() - struck_at
        if case.victim != "trainer":
            told = await rig.trainer.outcome(OUTCOME_TIMEOUT_S)
        after = await self._served(lambda now: not now.updates)
        settled_s = self._clock.now() - struck_at
        active = after.committed[POLICY]
        again = await self._publish_again()
        problems = [
            *_wrong_version(told, before.committed[POLICY], active),
            *_wrong_successor(again, active),
        ]
        return CaseReport(
            number=number,
            name=case.name,
            has_struck=has_struck,
            outcome=told.outcome or "unknown",
            by=sorted(set(told.by.values())),
            why=told.why,
            served_s=round(served_s, 2),
            settled_s=round(settled_s, 2),
            problems=problems,
        )

    def leftovers(self) -> list[str]:
        """What should not be there while nothing is published."""
        rig = self._rig
        problems = [f"unfinished file {each}" for each in unfinished_files(rig.weights_dir, LEDGER)]
        living = owners_in(rig.ledger)
        problems += [f"a dead store's: {each}" for each in held_by(self.owners - living)]
        if len(segments := held_by(living)) > MAX_SEGMENTS:
            problems.append(f"{len(segments)} segments in shared memory")
        if (n_sockets := n_listening(rig.trainer.pid)) > MAX_LISTENING:
            problems.append(f"the trainer listens on {n_sockets} sockets")
        hosts = {name: len(rig.fleet.host_pids(name)) for name in rig.fleet.worker_names}
        return [*problems, *(f"{name} has {n} engine hosts" for name, n in hosts.items() if n != 1)]

    def kept(self) -> list[str]:
        """What a trainer that was told to forget still keeps."""
        n_sockets = n_listening(self._rig.trainer.pid)
        return [f"the trainer has forgotten, and listens on {n_sockets} sockets"] * (n_sockets > 0)

    def _order(self, case: Case | None = None, require: str = "any") -> Order:
        self._n_orders += 1
        value = float(self._n_orders)
        if case is None:
            return Order(value, require=require)
        return Order(value, case.transport, case.mode, case.in_flight, case.require)

    async def _publish_again(self) -> Told:
        trainer = self._rig.trainer
        while True:
            trainer.publish(self._order(require="all"))
            told = await trainer.outcome(OUTCOME_TIMEOUT_S)
            # What a dead trainer began may go on for a while, between two tries unseen.
            if not told.why.startswith("update_in_progress"):
                return told

    async def _served(
        self, is_so: Callable[[FleetStatus], bool], states: Collection[str] = ("ready",)
    ) -> FleetStatus:
        """Wait until everybody serves one version and holds its bytes, and `is_so`."""
        last = ""
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                await self._rig.fleet.wait_ready(RECOVERY_TIMEOUT_S)
                while True:
                    try:
                        status = await self._client.status()
                        if not (self._is_one(status, states) and is_so(status)):
                            last = str(status)
                        elif not (last := await self._problem_of(status.committed[POLICY])):
                            return status
                    except BusError as error:
                        last = str(error)
                    await asyncio.sleep(PACE_S)
        except TimeoutError:
            raise TimeoutError(f"the fleet did not come back: {last}") from None

    def _is_one(self, status: FleetStatus, states: Collection[str]) -> bool:
        wanted = [status.committed.get(POLICY)] * len(self._rig.fleet.worker_names)
        return [w.version for w in status.workers if w.state in states] == wanted

    async def _problem_of(self, version: int) -> str:
        """Why not all engines hold and sample with this version, asked of themselves."""
        found = await self._client.check_weights()
        names = {name for name, held in found.by_worker.items() if held.version == version}
        if not found.is_ok or names != set(self._rig.fleet.worker_names):
            return f"weights differ: {found}"
        prompt = [self._n_orders]
        sampled = await self._client.generate(prompt, PROBE, versions="latest")
        return (
            "" if sampled.version_runs == [(version, 2)] else f"sampled with {sampled.version_runs}"
        )


def _is_reborn(case: Case, worker: str, before: FleetStatus, now: FleetStatus) -> bool:
    """Whether the router knows of the victim's death; a dead host cannot say what it holds."""
    if case.victim == "router":
        return now.instance != before.instance
    epochs = {each.name: each.epoch for each in before.workers}
    return case.victim != "worker" or any(
        each.epoch != epochs[worker] for each in now.workers if each.name == worker
    )


def _wrong_version(told: Told, old: int, active: int) -> list[str]:
    """What its trainer heard has to be so; whoever died before that may have got either."""
    if told.outcome == "unknown":
        return [f"nobody told its trainer what became of it: {told}"]
    allowed = {"committed": {told.version}, "refuted": {old}}.get(
        told.outcome or "", {old, told.version}
    )
    if active in allowed:
        return []
    return [f"version {active} is active, {told.version} was {told.outcome}, {old} before it"]


def _wrong_successor(again: Told, before: int) -> list[str]:
    if again.outcome == "committed" and again.version > before:
        return []
    return [f"the next publication: {again}"]


@contextmanager
def _named(case: str) -> Generator[None]:
    """Say of any error in which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(case)
        raise


@contextmanager
def _directory(settings: WeightDrillSettings) -> Generator[Path]:
    if settings.directory:
        path = Path(settings.directory).absolute()
        path.mkdir(parents=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="weights-") as name:
            yield Path(name)
