import json
from pathlib import Path

import pytest

from rolloutbus import OfflineRollouts
from rolloutbus.examples.demo import HELD_OUT_WORDS, DemoOptions, run_demo
from rolloutbus.examples.imitation import evaluate, train
from rolloutbus.examples.offline import steps
from rolloutbus.examples.retrain import retrain
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.player_core import THE_TAP
from rolloutbus.replay.trajectories import Trajectories
from rolloutbus.replay.trajectory_files import write
from tests.integration.raw_subscriber import messages_in, received_in_replay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 16
LEARNT = 0.01
"""Far below what is learnt offline: 0.06, give or take 0.015."""
NEVER_S = 3600.0


async def test_short_run_loses_nothing_though_a_worker_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = DemoOptions(
        steps=STEPS, quiet=True, runs=tmp_path, time_limit_s=NEVER_S, record=str(journal)
    )

    summary = await run_demo(options)

    print(summary)
    assert (summary.steps, summary.versions) == (STEPS, STEPS)
    assert summary.rollouts_finished == summary.rollouts_requested > 0
    assert (summary.lost, summary.duplicated) == (0, 0)
    assert summary.resumed >= summary.killed_mid_generation >= 4
    assert summary.rollouts_finished // 2 < summary.witnessed <= summary.rollouts_finished
    assert summary.reward_first < 0.3
    assert summary.reward_constant <= 0.3
    assert summary.stale_token_share > 0.0
    assert summary.max_staleness <= options.max_staleness
    await assert_is_recorded(journal, summary.rollouts_finished + HELD_OUT_WORDS)
    assert_trains_again(journal, tmp_path / "trajectories.parquet", Path(summary.run_directory))
    assert_learns_offline(journal, tmp_path / "new")


async def assert_is_recorded(journal: Path, n_rollouts: int) -> None:
    """Each rollout is there to be exported, and each subscriber of a replay hears every byte."""
    found = Trajectories(Journal(journal))
    assert len(list(found)) == n_rollouts
    assert found.requests.n_headless == found.requests.n_open == 0
    expected = messages_in(journal)
    heard = await received_in_replay(journal, n_subscribers=2)
    assert {name: [expected[name]] * 2 for name in heard} == heard
    assert heard.keys() | {THE_TAP} == expected.keys()


def assert_trains_again(journal: Path, export: Path, run: Path) -> None:
    """From the recording, and from its export, each step comes out with the loss that it had."""
    write(export, Trajectories(Journal(journal)))
    for source in (journal, export):
        losses = list(retrain(OfflineRollouts(source), run))
        assert len(losses) == STEPS
        for then, now in losses:
            assert now == pytest.approx(then, rel=1e-5, abs=1e-7)


def assert_learns_offline(journal: Path, directory: Path) -> None:
    """A new model learns from what others sampled, most of it badly."""
    build_tiny_model(directory, seed=0)
    model = load_tiny_model(directory)
    before = evaluate(model, seed=0)
    rewards = list(train(steps(OfflineRollouts(journal)), model, STEPS))
    after = evaluate(model, seed=0)
    print(f"{len(rewards)} steps offline: {before:.3f} -> {after:.3f}")
    assert len(rewards) >= STEPS
    assert max(rewards) < 0.4
    assert after > before + LEARNT


async def test_run_leaves_its_configuration_its_numbers_and_a_picture(tmp_path: Path) -> None:
    options = DemoOptions(
        steps=3, quiet=True, kill=False, updates=False, runs=tmp_path, time_limit_s=NEVER_S
    )

    summary = await run_demo(options)

    directory = Path(summary.run_directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads((directory / "config.json").read_text())["updates"] is False
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(summary.as_json())["versions"] == 0
    assert (summary.resumed, summary.max_staleness) == (0, 0)
