"""The timeline of a recorded fleet shows what was done to it, as long as it took."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Rollout, WeightPublisher
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.recorder import Recorder
from rolloutbus.replay.timeline.lanes import Execution, Timeline
from rolloutbus.replay.timeline.timeline import timeline_of
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.types import Published
from tests.integration.killed_trainer import WEIGHTS
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    START_S,
    UNHURRIED,
    Streamed,
    fake_sampling,
    status_when,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

N_PLAIN = 6
HELD_AT = 40
"""Tokens of the rollout whose worker is killed, when that happens."""


@dataclass
class Run:
    """What happened, as those who did it know."""

    journal: Path
    plain: list[Rollout]
    """Nobody streamed them."""
    published: Published
    resumed: Rollout
    """Its first worker was killed."""
    victim: str
    cut: Rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    directory = tmp_path_factory.mktemp("timeline")
    journal, token_limit = directory / "j", TokenLimit(directory / "limit")
    options: UpOptions = {
        "workers": 2,
        "engine": "fake",
        "engine_options": {"slots": 8, "step_s": 0.005, "hold_file": str(token_limit.path)},
        "tap": True,
        "lease": UNHURRIED,
    }
    async with rolloutbus.up(**options) as fleet:
        client_settings = ClientSettings(
            name="trainer", router=fleet.address, lease=UNHURRIED, overtime_s=DEADLINE_S
        )
        recorder = Recorder(ClientSettings(name="recorder", router=fleet.address), journal)
        async with rolloutbus.RolloutClient(client_settings) as client, recorder:
            await recorder.caught_up(DEADLINE_S)
            plain = await asyncio.gather(
                *(
                    client.generate([1, n], fake_sampling(50), deadline_s=DEADLINE_S)
                    for n in range(N_PLAIN)
                )
            )
            endless = Streamed(client, [3], fake_sampling(ENDLESS), deadline_s=START_S)
            await endless.reached(20)
            published = await WeightPublisher(client).publish(
                WEIGHTS, require="all", in_flight="keep", deadline_s=DEADLINE_S
            )
            await endless.seen(lambda: endless.deltas[-1].version == published.version)
            await client.pause("in_place", target="w1")
            await client.resume(target="w1")
            cut = await endless.cut()
            with token_limit.at(HELD_AT):
                long = Streamed(client, [4], fake_sampling(HELD_AT + 20), deadline_s=START_S)
                await long.reached(HELD_AT)
                victim = long.worker
                await recorder.caught_up(DEADLINE_S)  # its first rows, too
                fleet.kill(victim)
            resumed = await long.rollout(deadline_s=START_S)
            await status_when(
                client,
                lambda status: {each.name for each in status.workers} == {"w0", "w1"},
                START_S,
            )
            await recorder.caught_up(DEADLINE_S)
        yield Run(journal, plain, published, resumed, victim, cut)


@pytest.fixture(scope="module")
def timeline(run: Run) -> Timeline:
    return timeline_of(Journal(run.journal))


def attempts(timeline: Timeline, rid: str) -> list[tuple[str, Execution]]:
    """(worker, execution), in order."""
    found = [
        (lane.name, each) for lane in timeline.lanes for each in lane.executions if each.rid == rid
    ]
    return sorted(found, key=lambda each: each[1].attempt)


async def test_every_rollout_is_on_its_worker_with_all_of_its_tokens(
    run: Run, timeline: Timeline
) -> None:
    for rollout in [*run.plain, run.cut]:
        ((worker, execution),) = attempts(timeline, rollout.rid)
        assert worker == rollout.worker
        assert execution.n_tokens == len(rollout.tokens)
        assert execution.outcome == ("cancelled" if rollout is run.cut else "finished")
        assert execution.spans[0].kind in {"prefill", "decode"}
        decoded = [each for each in execution.spans if each.kind == "decode"]
        assert [(each.version, each.n_tokens) for each in decoded] == list(rollout.version_runs)


async def test_the_stalls_are_those_that_the_trainer_was_told(run: Run, timeline: Timeline) -> None:
    stalls = {
        lane.name: [each for each in lane.weights if each.kind == "stall"]
        for lane in timeline.lanes
    }
    for worker, stall_ms in run.published.stall_ms.items():
        first = stalls[worker][0]
        assert first.version == run.published.version
        assert (first.end_s - first.start_s) * 1000 == pytest.approx(stall_ms, abs=0.01)
    (update,) = timeline.updates
    assert update.version == run.published.version


async def test_the_pause_is_on_the_worker_that_was_paused(timeline: Timeline) -> None:
    paused = {
        lane.name: [each for each in lane.states if each.kind == "paused"]
        for lane in timeline.lanes
    }
    assert not paused["w0"]
    assert len(paused["w1"]) == 1


async def test_the_killed_worker_is_gone_and_its_rollout_goes_on_at_the_other(
    run: Run, timeline: Timeline
) -> None:
    (first_on, first), *_, (last_on, last) = attempts(timeline, run.resumed.rid)
    assert (first_on, first.outcome) == (run.victim, "lost")
    assert (last_on, last.outcome) == (run.resumed.worker, "finished")
    assert last.n_resumed == run.resumed.n_resumed > 0
    assert last.n_tokens == len(run.resumed.tokens) - run.resumed.n_resumed
    lane = next(each for each in timeline.lanes if each.name == run.victim)
    gone = next(each for each in lane.states if each.kind == "gone")
    assert gone.start_s <= first.end_s
    lost = next(each for each in first.spans if each.kind == "lost")
    assert lost.end_s == first.end_s


async def test_each_kind_of_file_is_made_of_it(run: Run, tmp_path: Path) -> None:
    beginnings = {"html": b"<!doctype html>", "json": b"{", "png": b"\x89PNG", "svg": b"<?xml"}
    for suffix, beginning in beginnings.items():
        out = tmp_path / f"timeline.{suffix}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rolloutbus.cli.main", "timeline"),
            *(str(run.journal), "-o", str(out), "--json"),
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
        )
        async with asyncio.timeout(START_S):  # one of them may have fonts to look for
            told, _ = await process.communicate()
        assert process.returncode == 0
        assert out.read_bytes().startswith(beginning)
        assert json.loads(told)["executions"] >= N_PLAIN + 3
