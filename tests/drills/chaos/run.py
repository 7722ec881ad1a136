"""One chaos run from its seed to its report."""

import asyncio
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.client import connect
from tests.drills.chaos.crowd import TRAINER, Record
from tests.drills.chaos.history import Life, Oracle, fake_oracle, judge, lives_of
from tests.drills.chaos.inheritance import note_owed
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.records import Looked, read_history, read_publications
from tests.drills.chaos.recovery import ROUTER_S
from tests.drills.chaos.report import Report, report
from tests.drills.chaos.rig import Rig
from tests.drills.chaos.schedule import ROUTER_KINDS, Salvo, draw_salvos
from tests.drills.chaos.settings import ChaosSettings
from tests.drills.chaos.usage import Usage, growths, usages_of

WARM_UP_S = 3.0
WELL_TIMEOUT_S = 180.0
SETTLED_S = 3.0
"""After the last fault, until the router has forgotten who left."""
NOTICED_S = 3.5
"""From one salvo to the next at least: by then work that was hit has usually another place. After
a fault of the router that is so only `ROUTER_S` after it is back."""
N_GREEDY_PROMPTS = 16


async def run_chaos(
    settings: ChaosSettings, on_progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Break a fleet as the seed says, then judge what its clients saw.

    Args:
        settings: of the run.
        on_progress: is told in a few words where it stands.

    Raises:
        ProcessFailed: a process could not be kept running.
    """
    clock = BootClock()
    begun_at = clock.now()
    rng = Random(settings.seed)
    salvos = draw_salvos(rng, settings.faults, settings.faults_for_s)
    with _directory(settings) as path:
        rig = Rig(settings, path, _prompts(settings))
        on_progress("starting")
        async with rig:
            oracle = await _oracle(settings, rig)
            await rig.crowd.start(rig.fleet.address)
            await asyncio.sleep(WARM_UP_S)
            n_first = len(salvos) // 4
            await _strike_all(rig, salvos[:n_first], on_progress)
            # Not before the first faults: libzmq keeps what its queues have grown to once.
            before = await _usages_when_well(rig)
            await _strike_all(rig, salvos[n_first:], on_progress)
            on_progress("healing")
            after = await _usages_when_well(rig)
            on_progress("waiting for the last answers")
            await rig.crowd.drain()
        on_progress("judging")
        (path / "faults.json").write_bytes(msgspec.json.encode(rig.struck))
        lives, ledger, looks = _history(rig.crowd.records)
        note_owed(lives.values(), looks, rig.struck)
        verdict = judge(lives, oracle, ledger)
        seconds = clock.now() - begun_at
        found = report(settings, seconds, verdict, ledger, lives.values(), rig.struck)
        return found.having(growths(before, after), rig.surprises)


async def _usages_when_well(rig: Rig) -> dict[str, Usage]:
    """What all processes hold when nobody is missing: a worker that is new has few connections."""
    await rig.wait_well(WELL_TIMEOUT_S)
    await asyncio.sleep(SETTLED_S)
    return usages_of(rig.pids)


def _history(records: Iterable[Record]) -> tuple[dict[str, Life], Ledger, list[Looked]]:
    """What all processes wrote down, those that were killed included."""
    lives: dict[str, Life] = {}
    looks: list[Looked] = []
    ledger = Ledger()
    for record in records:
        if not record.path.exists():
            continue  # killed before it began
        if record.process == TRAINER:
            ledger.add(read_publications(record.path))
        else:
            history = list(read_history(record.path))
            looks += (each for each in history if isinstance(each, Looked))
            for op, life in lives_of(history, is_excused=record.was_killed).items():
                lives.setdefault(op, Life()).join(life)
    return lives, ledger, looks


@contextmanager
def _directory(settings: ChaosSettings) -> Generator[Path]:
    if settings.directory:
        path = Path(settings.directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            yield Path(name)


async def _strike_all(rig: Rig, salvos: list[Salvo], on_progress: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    first_at = loop.time() - (salvos[0].at_s if salvos else 0.0)
    not_before = 0.0
    for salvo in salvos:
        strike_at = max(first_at + salvo.at_s, not_before)
        await asyncio.sleep(max(0.0, strike_at - loop.time()))
        await rig.strike(salvo.faults)
        not_before = loop.time() + NOTICED_S
        if any(fault.kind in ROUTER_KINDS for fault in salvo.faults):
            await rig.wait_router_well(WELL_TIMEOUT_S)
            not_before = loop.time() + ROUTER_S
        last = rig.struck[-1]
        on_progress(f"{len(rig.struck)} faults, last {last.kind} {last.victim}")
    await asyncio.sleep(max(0.0, not_before - loop.time()))


def _prompts(settings: ChaosSettings) -> list[list[int]]:
    """What a real model is asked: few prompts, whose answers can be known beforehand."""
    if settings.engine == "fake":
        return []
    return [[1 + number, *range(2, 2 + number % 7)] for number in range(N_GREEDY_PROMPTS)]


async def _oracle(settings: ChaosSettings, rig: Rig) -> Oracle:
    """The fake engine's function; of a real model, what it says while nothing is broken."""
    prompts = _prompts(settings)
    if not prompts:
        return fake_oracle
    sampling = SamplingParams(max_new_tokens=settings.max_tokens, temperature=0.0, ignore_eos=True)
    async with connect(rig.fleet.address, name="reference") as client:
        groups = await client.generate_batch(prompts, sampling, deadline_s=settings.deadline_s)
    known = {
        np.array(prompt, "<i4").tobytes(): rollout.tokens.tolist()
        for prompt, [rollout] in zip(prompts, groups, strict=True)
    }
    return lambda request, versions: known[request.prompt][: len(versions)]
