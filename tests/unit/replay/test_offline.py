"""What was recorded can be trained on: as it was sampled, in groups, as often as one likes."""

from pathlib import Path

import numpy as np
import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.offline import OfflineRollouts
from rolloutbus.replay.trajectories import Trajectory
from rolloutbus.replay.trajectory_files import write


def row(number: int, group: str = "", policy: str = "default", version: int = 1) -> Trajectory:
    """Two tokens of `version`, and one of the next."""
    return Trajectory(
        rid=f"c/{number}",
        client="c",
        session="s",
        group=group,
        policy=policy,
        lora="",
        prompt_ids=np.array([3, 1, 2], "<i4"),
        output_ids=np.array([7, 8, number], "<i4"),
        logprobs=np.array([-0.5, -1.5, -0.25], "<f4"),
        behaviour_logprobs=np.array([-0.5, -1.25, -0.25], "<f4"),
        run_versions=[version, version + 1],
        run_lengths=[2, 1],
        finish_reason="length",
        worker="w0",
        n_attempts=2,
        n_resumed=1,
        max_new_tokens=3,
        temperature=1.0,
        top_p=0.9,
        top_k=0,
        seed=None,
        asked_at=10.0,
        ended_at=11.0 + number,
        queue_ms=1.0,
        run_ms=5.0,
    )


@pytest.fixture(params=[".jsonl", ".parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"export{request.param}"


def test_a_rollout_comes_back_as_its_client_had_it(path: Path) -> None:
    write(path, [row(4, "g", version=2**40)])

    (found,) = OfflineRollouts(path)

    rollout = found.rollout
    assert found.prompt.tolist() == [3, 1, 2]
    assert (found.group, found.session, found.policy, found.ended_at) == ("g", "s", "default", 15.0)
    assert (rollout.rid, rollout.worker, rollout.finish_reason) == ("c/4", "w0", "length")
    assert (rollout.tokens.dtype, rollout.tokens.tolist()) == (np.int32, [7, 8, 4])
    assert (rollout.logprobs.dtype, rollout.logprobs.tolist()) == (np.float32, [-0.5, -1.5, -0.25])
    assert rollout.behaviour_logprobs.tolist() == [-0.5, -1.25, -0.25]
    assert rollout.token_versions.tolist() == [2**40, 2**40, 2**40 + 1]
    assert (rollout.n_prompt_tokens, rollout.n_attempts, rollout.n_resumed) == (3, 2, 1)


def test_groups_come_as_they_are_complete_and_again_if_one_asks_again(path: Path) -> None:
    names = ["a", "b", "", "b", "a", "a", "c", "a"]
    write(path, [row(number, name) for number, name in enumerate(names)])
    source = OfflineRollouts(path)

    for _ in range(2):
        found = [[each.rollout.rid for each in group] for group in source.groups(2)]
        assert found == [["c/1", "c/3"], ["c/0", "c/4"], ["c/5", "c/7"]]


def test_the_same_seed_gives_the_same_order(path: Path) -> None:
    write(path, [row(number, f"g{number}") for number in range(50)])
    source = OfflineRollouts(path)

    def order(seed: int) -> list[str]:
        return [group[0].rollout.rid for group in source.shuffled_groups(1, seed)]

    assert order(7) == order(7) != order(8)
    assert sorted(order(7)) == sorted(order(8))
    assert len(order(7)) == 50


def test_old_weights_and_other_policies_are_left_out(path: Path) -> None:
    versions, policies = [1, 5, 6, 7], ["default", "default", "other", "default"]
    pairs = zip(versions, policies, strict=True)
    write(
        path, [row(n, policy=policy, version=version) for n, (version, policy) in enumerate(pairs)]
    )

    found = OfflineRollouts(path, policy="default", min_version=5)

    assert [each.rollout.rid for each in found] == ["c/1", "c/3"]
    assert [each.oldest_version for each in found] == [5, 7]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("nothing.parquet", SettingsError, "no such file"),
        ("table.csv", SettingsError, "neither a journal"),
        ("", JournalError, "no journal"),
    ],
)
def test_what_is_no_recording_is_named(
    tmp_path: Path, name: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        OfflineRollouts(tmp_path / name)
