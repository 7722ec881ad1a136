"""Fleets have names: each is found by its own, and none in place of another."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.app import app
from rolloutbus.launcher.discovery import (
    AmbiguousFleet,
    NoSuchFleet,
    Registration,
    find_fleet,
    running_fleets,
)
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.run_dir import user_dir

HOLD = """
import sys
from rolloutbus.launcher.discovery import Registration
with Registration("killed") as registration:
    registration.announce("ipc:///killed")
    print("held", flush=True)
    sys.stdin.read()
"""
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def entries() -> list[str]:
    return [path.name for path in user_dir().iterdir() if path.name != "lock"]


def test_the_only_fleet_is_found_without_a_name_until_it_ends() -> None:
    with Registration("") as mine:
        mine.announce("ipc:///x", "a.key")
        found = find_fleet()
        assert (found.name, found.address, found.key_file) == ("default", "ipc:///x", "a.key")
        assert found == find_fleet("default")
        assert found.pid == os.getpid()
        mine.announce("ipc:///y")
        assert find_fleet().address == "ipc:///y"
    with pytest.raises(NoSuchFleet, match="rolloutbus up"):
        find_fleet()
    assert entries() == []


@pytest.mark.parametrize("line", ["status", "generate --prompt-ids 1", "status --name default"])
def test_a_fleet_that_is_starting_is_said_to_be_starting(line: str) -> None:
    began = re.compile(
        r"error: the fleet default has been starting since \d\d:\d\d:\d\d "
        rf"\(pid {os.getpid()}\): try again when `rolloutbus ls` shows its address\n"
    )
    with Registration("") as mine:
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 3
        assert began.fullmatch(result.stderr)
        assert " starting " in CliRunner().invoke(app, ["ls"]).stdout
        with Registration("other") as other:
            other.announce("ipc:///x")
            with pytest.raises(AmbiguousFleet, match=r"--name \(default, other\)"):
                find_fleet()
            assert find_fleet("other").address == "ipc:///x"
        mine.announce("ipc:///y")
        assert find_fleet().address == "ipc:///y"


def test_a_second_fleet_takes_nothing_over_and_a_name_is_asked_for() -> None:
    with Registration("") as first:
        first.announce("ipc:///first")
        with Registration("") as second:
            second.announce("ipc:///second")
            assert [each.name for each in running_fleets()] == ["default", "default-2"]
            with pytest.raises(AmbiguousFleet, match=r"--name \(default, default-2\)") as caught:
                find_fleet()
            assert caught.value.names == ["default", "default-2"]
            assert find_fleet("default").address == "ipc:///first"
            assert find_fleet("default-2").address == "ipc:///second"
            with pytest.raises(NoSuchFleet, match="did you mean default-2"):
                find_fleet("defualt-2")
        assert find_fleet().address == "ipc:///first"


def test_the_first_fleet_may_end_before_the_second() -> None:
    first, second = Registration(""), Registration("")
    with second:
        pass
    first.__enter__()
    second.__enter__()
    second.announce("ipc:///second")
    first.__exit__(None, None, None)
    assert find_fleet().address == "ipc:///second"
    second.__exit__(None, None, None)
    assert entries() == []


def test_a_name_is_of_one_fleet_at_a_time() -> None:
    with (
        Registration("mine"),
        pytest.raises(SettingsError, match="named mine runs here already"),
        Registration("mine"),
    ):
        pass
    with Registration("mine"):
        pass


@pytest.mark.parametrize("name", ["a/b", "..", "-x", "a b", "x" * 65, "a\n", "ä"])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="is no name"):
        Registration(name)


def test_what_a_killed_process_left_behind_is_no_fleet() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert find_fleet("killed").pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
    # Its process id may be another's by now: nobody asks for it.
    assert running_fleets() == []
    assert entries() == []
    with Registration("killed"):
        pass


def test_a_command_that_could_mean_two_fleets_asks_which_one() -> None:
    cli = CliRunner()
    with (
        Registration("one", model="./m", engine="fake", workers=3) as one,
        Registration("two") as two,
    ):
        one.announce("ipc:///nowhere/one")
        two.announce("ipc:///nowhere/two")
        for line in ("status", "pause", "top", "record ./j", "tail", "weights check"):
            result = cli.invoke(app, line.split())
            assert result.exit_code == 2, (line, result.output)
            assert "say which one with --name (one, two)" in result.output
        result = cli.invoke(app, ["status", "--name", "one"])
        assert result.exit_code == 3
        assert "no router answers at ipc:///nowhere/one" in result.output
        listed = cli.invoke(app, ["ls"])
        assert listed.exit_code == 0
        row = next(line for line in listed.output.splitlines() if line.startswith("one"))
        assert all(each in row for each in ("ipc:///nowhere/one", "./m", "3", str(os.getpid())))
    assert "no fleet of yours runs here" in cli.invoke(app, ["ls"]).output
    assert cli.invoke(app, ["ls", "--json"]).output == "[]\n"


def test_an_address_in_a_pipe_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    address = f"tcp://127.0.0.1:7777#{'0123456789abcdef' * 4}"
    with Registration("far") as registration:
        registration.announce(address)
        assert address in CliRunner().invoke(app, ["ls"]).stdout


def test_a_list_of_fleets_breaks_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    address = "ipc:///tmp/rolloutbus-1000/run-0123456789/frontend"
    with Registration("one") as one, Registration("two") as two:
        one.announce(address)
        two.announce(address)
        listed = CliRunner().invoke(app, ["ls"]).stdout
        assert listed.count(f"address: {address}\n") == 2
        monkeypatch.setenv("COLUMNS", "200")
        table = CliRunner().invoke(app, ["ls"]).stdout.splitlines()
        assert [line.count(address) for line in table] == [0, 1, 1]
