"""A fleet on a real Ray cluster of three nodes: it survives one of them, and leaves nothing."""

import asyncio
import os
import re
import signal
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus.examples.tiny_model import build_tiny_model
from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import process_ends
from tests.line_process import LineProcess, line_processes

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("RAY_PYTHON", ROOT / ".venv-ray" / "bin" / "python"))
"""Another release of Ray: RAY_PYTHON=.venv-skyrl-0.2/bin/python."""
DEADLINE_S = 60.0
N_ROLLOUTS = 64

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module", autouse=True)
def own_directory() -> Iterator[Path]:
    """Files of fleets and of Ray, apart from those of others; also marks all processes."""
    # Not tmp_path: socket paths would be too long.
    with tempfile.TemporaryDirectory(prefix="rb-") as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", path)
        patch.setenv("RAY_TMPDIR", path)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield Path(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "tiny"
    build_tiny_model(path, seed=0)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(own_directory: Path) -> AsyncIterator[LineProcess]:
    del own_directory
    async with line_processes([["tests.adapters.ray.cluster_program"]], PYTHON) as [process]:
        yield process
        await process.ask("stop")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(cluster: LineProcess) -> str:
    return (await cluster.ask("address"))["address"]


def ours(directory: Path) -> list[int]:
    """The fleets' processes, of which every one knows the directory."""
    mark = f"XDG_RUNTIME_DIR={directory}".encode()
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        is_actor = b"rolloutbus." in command and b"cli.main" not in command
        if mark in variables and (is_actor or b"ProcessHost" in command):
            found.append(int(process.name))
    return found


def files_of_fleets(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("rolloutbus-*/*") if path.name != "lock"]


async def nothing_is_left(directory: Path) -> None:
    """Wait until the last process of a fleet is gone: what is killed takes a moment."""
    while left := ours(directory):
        for pid in left:
            await process_ends(pid)


async def test_a_run_completes_though_a_node_is_killed(
    cluster: LineProcess, address: str, model: Path, own_directory: Path
) -> None:
    program = ["tests.adapters.ray.fleet_program", "lose_a_node", address, str(model)]
    async with line_processes([program], PYTHON) as [process]:
        paused = await process.hear()
        assert paused["n_running"] > 0
        await cluster.ask("kill", node=paused["node"])
        sampled = await process.ask("resume")
        assert sampled["n_sampled"] == N_ROLLOUTS, "by the worker that is left"
        added = (await cluster.ask("add"))["node"]
        told = await process.ask("go on")
        await process.ended()
    assert told["n_tokens"] == [100] * N_ROLLOUTS
    assert len(set(told["rids"])) == N_ROLLOUTS
    assert told["n_moved"] == paused["n_running"], "those that were under way there"
    victim = paused["victim"]
    assert told["nodes"] == {**told["first"], victim: added}
    assert any(line.startswith(f"{victim} died: was lost: its actor") for line in told["told"])
    [survivor] = {"w0", "w1"} - {victim}
    assert told["logged"][survivor] >= told["n_moved"]
    assert told["refused"].startswith("strategy: STRICT_SPREAD holds among the 2 workers")
    assert told["versions_after"] == [[[told["version"], 5]]] * 2
    await nothing_is_left(own_directory)
    assert files_of_fleets(own_directory) == []


@pytest.mark.shows("Ray actors")
async def test_a_program_on_ray_gives_a_fleet_bundles_of_its_group(
    address: str, own_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    (tmp_path / "model.safetensors").touch()
    program = ["tests.adapters.ray.fleet_program", "share_a_group", address, str(tmp_path)]
    async with line_processes([program], PYTHON) as [process]:
        told = await process.hear()
        assert told["gpus"] == {"w0": "0,1", "w1": "0,1"}
        assert told["nodes"]["w0"] == told["bundle_nodes"][0] == told["bundle_nodes"][1]
        assert told["nodes"]["w1"] == told["bundle_nodes"][2] == told["bundle_nodes"][3]
        assert told["free_in_group"] == 0, "Ray counts each of them as used"
        first, second = told["tokens"]
        assert len(first) == 5
        assert first == second
        after = await process.hear()
        assert after["is_initialized"]
        assert after["state"] == "CREATED", "the group is the program's"
        raised, refused, failed = after["errors"]
        assert raised == "no worker 'w9': there are w0"
        assert "room for 2 of 3 workers; each worker asks for 2 GPU, 1 CPU" in refused
        assert re.match("w0: engine_failed: .*nonsense", failed)
        await nothing_is_left(own_directory)
        process.tell("end")
        await process.ended()


async def test_workers_of_a_fleet_on_ray_come_and_go(
    address: str, own_directory: Path, tmp_path: Path
) -> None:
    program = ["tests.adapters.ray.fleet_program", "change_workers", address, str(tmp_path)]
    async with line_processes([program], PYTHON) as [process]:
        told = await process.hear()
        first, scaled = told["n_free"]
        assert first - scaled == 2, "Ray counts what the new workers use"
        assert told["sampled"] == [5, 5, 5]
        assert all(told["nodes"][name] for name in ("w0", "w1", "w2"))
        assert told["is_another"]
        assert (told["added"], told["variables"]) == ("w3", {"w0": "WARN", "w3": "INFO"})
        assert told["names"] == ["w0"]
        assert "Ray chooses the GPUs" in told["refused"]
        assert "w4 scaled: does not serve, and is ended" in told["told"]
        assert "w3 scaled: has left" in told["told"]
        own = await process.hear()
        assert own["names"] == ["w0", "w1"]
        assert own["refused"] == (
            "placement_group: its bundles have room for 2 workers, not for w2"
        )
        await process.ended()
    await nothing_is_left(own_directory)
    assert files_of_fleets(own_directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
async def test_up_on_ray_leaves_no_process(
    number: signal.Signals, address: str, own_directory: Path, tmp_path: Path
) -> None:
    command = [
        *(PYTHON, "-m", "rolloutbus.cli.main", "up", "--engine", "fake", "-n", "1"),
        *("--launcher", "ray", "--ray-option", f"address={address}"),
        *("--run-dir", tmp_path / "run", "--keep-logs"),
    ]
    up = await asyncio.create_subprocess_exec(*command, env=environment(), stdout=PIPE)
    assert up.stdout is not None
    async with asyncio.timeout(2 * DEADLINE_S):
        while not (await up.stdout.readline()).startswith(b"Stop with"):
            assert not up.stdout.at_eof()
        assert len(ours(own_directory)) >= 4
        up.send_signal(number)
        assert await up.wait() == (130 if number == signal.SIGINT else -number)
    await nothing_is_left(own_directory)
    if number == signal.SIGINT:
        assert files_of_fleets(own_directory) == []
        logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
        assert {"router.log", "store.log"} <= logs
