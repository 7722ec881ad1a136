"""What is paused, which tokenizer is meant, what is waited for, and what a shell completes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rolloutbus.bus.actor.process import read_progress, tell_progress
from rolloutbus.bus.actor.variables import PROGRESS
from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.cli.app import MODULES, app
from rolloutbus.cli.commands.control import is_paused
from rolloutbus.cli.fleet_check import judged, reach
from rolloutbus.cli.main import COMPLETE_VARIABLE
from rolloutbus.cli.progress import in_words
from rolloutbus.launcher.discovery import Registration
from rolloutbus.launcher.plan import environment

QUIET = FleetStatus(1, "r", False, [], {}, 0, 0, 1, {})  # noqa: FBT003
READY = WorkerStatus("w0", "b0.1", "ready", "default", 7, "fake", 4, 2, 0, 0, 0.0, 42)
PAUSED = msgspec.structs.replace(READY, name="w1", state="paused")


@pytest.mark.parametrize(
    ("changes", "worker", "found"),
    [
        ({"workers": [READY]}, "", False),
        ({"workers": [READY], "pause": "drain"}, "", True),
        ({"workers": [READY], "pause": "drain"}, "w0", True),
        ({"workers": [READY], "pause": "drain", "paused": {"w0": ""}}, "w0", False),
        ({"workers": [READY], "paused": {"w1": "drain"}}, "w0", False),
        ({"workers": [READY, PAUSED]}, "", True),
        ({"workers": [READY, PAUSED]}, "w0", False),
    ],
)
def test_resume_knows_whether_anything_was_paused(
    changes: dict[str, object], worker: str, found: bool
) -> None:
    assert is_paused(msgspec.structs.replace(QUIET, **changes), worker) is found


def test_text_for_a_model_without_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    with Registration("exp", model=str(model)) as fleet:
        fleet.announce("ipc:///nowhere")
        for address in ("exp", "ipc:///nowhere"):
            result = CliRunner().invoke(app, ["generate", "hello", "--address", address])
            assert result.exit_code == 2
            assert "the fleet's model has no tokenizer: there is no" in result.stderr
            assert "--prompt-ids 1,2,3" in result.stderr


def test_what_is_waited_for_is_said_in_one_line() -> None:
    told = {"store": "starting", "w0": "loading weights", "w1": "loading weights"}
    assert in_words(told) == "store: starting; w0, w1: loading weights"
    assert in_words(dict.fromkeys(["w0", "w1", "w2"], "starting")) == "w0, w1 …: starting"
    assert in_words({}) == ""


@pytest.mark.parametrize(
    ("who", "out", "err"),
    [
        ("supervisor", '{"doing":"loading weights"}\n', ""),
        ("terminal", "", "loading weights …\n"),
        ("off", "", ""),
    ],
)
def test_progress_goes_to_whoever_asked_for_it(
    who: str,
    out: str,
    err: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PROGRESS, who)
    tell_progress("loading weights")
    assert tuple(capsys.readouterr()) == (out, err)
    assert read_progress(out.encode()) == ("loading weights" if out else "")


@pytest.mark.parametrize(
    ("endpoint", "state", "says"),
    [
        ("tcp://127.0.0.1:{taken}", "ok", "takes connections"),
        ("tcp://127.0.0.1:{free}", "failed", "is its process alive"),
        ("ipc:///nowhere/w0.stream", "failed", "No such file"),
    ],
)
async def test_a_plane_is_reached_or_it_is_said_what_to_do(
    endpoint: str, state: str, says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        ports = {"taken": taken.getsockname()[1], "free": free.getsockname()[1]}
        found = await reach(endpoint.format(**ports), "tcp://127.0.0.1:7777", "--stream")
    assert found.state == state
    assert says in found.says


async def test_streams_on_the_loopback_of_another_host_are_found() -> None:
    found = await reach("tcp://127.0.0.1:7801", "tcp://10.0.0.1:7777", "--stream")
    assert found.state == "failed"
    assert "from its own host only: start it with --stream tcp://HOST:0" in found.says


@pytest.mark.parametrize(
    ("offset_s", "error_s", "state", "says"),
    [
        (0.002, 0.001, "ok", "0.002 s ahead of this host's"),
        (-3.0, 0.1, "note", "3.000 s behind this host's, give or take 0.100 s; journals"),
        (0.9, 0.6, "ok", "ahead"),  # a slow answer says nothing of clocks
    ],
)
def test_clocks_that_differ_are_told(
    offset_s: float, error_s: float, state: str, says: str
) -> None:
    found = judged(offset_s, error_s)
    assert found.state == state
    assert says in found.says


def completed(shell: str, line: str) -> str:
    """What the program prints for a shell whose line is this one."""
    words = line.split(" ")
    variables = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return subprocess.run(
        [sys.executable, "-m", "rolloutbus.cli.main"],
        env={**environment(), COMPLETE_VARIABLE: f"complete_{shell}", **variables},
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    ).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    assert "status" in completed(shell, "rolloutbus sta")
    assert "check" in completed(shell, "rolloutbus weights ch")
    assert "--engine-option" in completed(shell, "rolloutbus up --engine-o")


def test_all_commands_are_completed_by_bash() -> None:
    assert completed("bash", "rolloutbus ").split() == list(MODULES)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_program(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0
    assert f"{COMPLETE_VARIABLE}=complete_{shell}" in result.stdout


def test_bash_takes_the_script(tmp_path: Path) -> None:
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    file = tmp_path / "rolloutbus.bash"
    file.write_text(f"{script}\ncomplete -p rolloutbus\n")
    done = subprocess.run(["bash", file], capture_output=True, check=True, text=True)  # noqa: S607
    assert done.stdout.startswith("complete -o default -F _rolloutbus_completion rolloutbus")


def test_a_reader_that_leaves_ends_a_command_without_a_word(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "rolloutbus.cli.main", "completion", "bash"],
            env={**environment(), "XDG_RUNTIME_DIR": str(tmp_path)},
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
            timeout=240,
        )
    assert done.stderr == b""
    assert done.returncode == 1
