"""`rolloutbus replay` plays, is interrupted, finds damage, and asks a live fleet again."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from rolloutbus import Fleet, subscribe
from rolloutbus.events import Finished
from rolloutbus.launcher.plan import environment
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.trajectories import Trajectories
from tests.integration import recorded_run
from tests.integration.live_fleet import START_S
from tests.integration.recorded_run import N_AFTERWARDS, N_TOKENS, Recording
from tests.integration.recording_ports import CLIENT
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(4 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET = recorded_run.FLEET


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recording(
    fleet: Fleet, token_limit: TokenLimit, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    return await recorded_run.recorded_run(
        fleet, token_limit, tmp_path_factory.mktemp("recording") / "j"
    )


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rolloutbus.cli.main", "replay", *map(str, arguments)]


async def started(*arguments: str | Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command(*arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )


async def address_of(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    assert line.startswith("address: "), line
    return line.split()[1]


async def test_the_command_plays_to_whoever_finds_it_by_its_address(recording: Recording) -> None:
    async with asyncio.timeout(2 * START_S):
        process = await started(recording.journal, "--speed", "max", "--wait", "1", "--json")
        finished: dict[str, list[int]] = {}
        async with subscribe(await address_of(process), clients=[CLIENT]) as subscriber:
            while not recording.rollouts.keys() <= finished.keys():
                event = await anext(subscriber)
                if isinstance(event, Finished) and event.finish_reason not in (None, "abort"):
                    finished[event.rid] = event.tokens.tolist()
        told, errors = await process.communicate()
    assert process.returncode == 0, errors
    for rid, rollout in recording.rollouts.items():
        assert finished[rid] == rollout.tokens.tolist()
    summary = json.loads(told)
    assert summary["n_played"] == summary["n_messages"]
    assert (sorted(summary["workers"]), summary["damages"]) == (["w0", "w1"], [])


async def test_an_interrupted_replay_leaves_nothing_behind(
    recording: Recording, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(recording.journal, "--wait", "1"),
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    async with asyncio.timeout(2 * START_S):
        path = Path((await address_of(process)).removeprefix("ipc://"))
        assert path.is_relative_to(tmp_path)
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130
    assert not path.parent.exists()


def copied(journal: Path, directory: Path) -> list[Path]:
    """A copy's segments, in order."""
    for file in journal.iterdir():
        if file.suffix.startswith(".rb"):
            (directory / file.name).write_bytes(file.read_bytes())
    return sorted(directory.iterdir())


def damaged_copy(journal: Path, directory: Path) -> str:
    """Returns the name of the file that has a wrong byte in its middle."""
    victim = copied(journal, directory)[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)
    return victim.name


async def test_a_damaged_journal_is_reported_and_played_only_when_asked_to(
    recording: Recording, tmp_path: Path
) -> None:
    victim = damaged_copy(recording.journal, tmp_path)
    async with asyncio.timeout(2 * START_S):
        process = await started(tmp_path, "--speed", "max", "--wait", "0")
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert victim in errors.decode()
        process = await started(tmp_path, "--speed", "max", "--wait", "0", "--allow-gaps", "--json")
        told, errors = await process.communicate()
    assert process.returncode == 0, errors
    assert len(json.loads(told)["damages"]) == 1
    assert b"damage: " in errors


async def test_a_journal_that_was_cut_short_is_played_to_where_it_stops(
    recording: Recording, tmp_path: Path
) -> None:
    last = copied(recording.journal, tmp_path)[-1]
    os.truncate(last, last.stat().st_size - 10)
    async with asyncio.timeout(2 * START_S):
        process = await started(tmp_path, "--speed", "max", "--wait", "0", "--json", "--allow-gaps")
        told, errors = await process.communicate()
        assert process.returncode == 0, errors
        process = await started(tmp_path, "--speed", "max", "--wait", "0")
        _, refusal = await process.communicate()
        assert process.returncode == 1, refusal
    (gap,) = json.loads(told)["gaps"]
    assert last.name in gap["sentence"]
    assert f"{gap['kind']}: {gap['sentence']}" in errors.decode()
    assert last.name in refusal.decode()
    summary = json.loads(told)
    assert summary["n_played"] == summary["n_messages"] > 0


async def test_a_damaged_journal_is_not_sampled_again_unless_asked_to(
    fleet: Fleet, recording: Recording, tmp_path: Path
) -> None:
    victim = damaged_copy(recording.journal, tmp_path)
    process = await started(tmp_path, "--regenerate", "--address", fleet.address)
    async with asyncio.timeout(2 * START_S):
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().startswith(f"error: {victim}")
    assert errors.count(b"\n") == 1


async def regenerated(fleet: Fleet, *arguments: str | Path) -> tuple[int | None, dict[str, object]]:
    process = await started(*arguments, "--regenerate", "--address", fleet.address, "--json")
    async with asyncio.timeout(2 * START_S):
        told, errors = await process.communicate()
    assert told, errors
    return process.returncode, json.loads(told)


async def test_what_is_sampled_again_by_the_same_weights_is_equal(
    fleet: Fleet, recording: Recording
) -> None:
    chosen = [option for rid in recording.last for option in ("--request", rid)]
    exact = ("--version", f"exact:{recording.version}")
    status, told = await regenerated(fleet, recording.journal, *exact, *chosen)
    assert (status, told["requests"], told["equal"]) == (0, N_AFTERWARDS, N_AFTERWARDS)
    assert told["max_logprob_delta"] == 0.0


async def test_other_weights_differ_from_the_first_token_that_they_had_not_sampled(
    fleet: Fleet, recording: Recording
) -> None:
    exact = ("--version", f"exact:{recording.version}")
    status, told = await regenerated(fleet, recording.journal, *exact)
    differences = cast("list[dict[str, object]]", told["differences"])
    found = {each["rid"]: each for each in differences}
    assert status == 1
    assert told["requests"] == len(list(Trajectories(Journal(recording.journal))))
    for rid, rollout in recording.rollouts.items():
        of_the_last = rollout.version_runs == [(recording.version, N_TOKENS)]
        assert found[rid]["is_equal"] == of_the_last
        assert found[rid]["versions_again"] == [[recording.version, N_TOKENS]]
        assert (found[rid]["first"] is None) == of_the_last
