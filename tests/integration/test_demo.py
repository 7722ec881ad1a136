import json
from pathlib import Path

import pytest

from examples.demo import DemoOptions, run_demo

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 16
NEVER_S = 3600.0


async def test_short_run_loses_nothing_though_a_worker_is_killed(tmp_path: Path) -> None:
    options = DemoOptions(steps=STEPS, quiet=True, runs=tmp_path, time_limit_s=NEVER_S)

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
