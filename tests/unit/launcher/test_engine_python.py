"""Workers may run with another interpreter, if it has the same rolloutbus."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

import rolloutbus
from rolloutbus.bus.wire.codec import PROTOCOL_VERSION
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.engine_python import InterpreterReport, check_python, find_python
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import FleetSettings
from rolloutbus.launcher.version import installed_version


def interpreter(path: Path, line: str) -> str:
    """A program in place of an interpreter, which does this with its arguments."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def says(path: Path, **other: object) -> str:
    told = InterpreterReport(PROTOCOL_VERSION, installed_version(), [])
    text = msgspec.json.encode(msgspec.structs.asdict(told) | other).decode()
    return interpreter(path, f"echo 'told:{text}'")


def test_this_interpreter_can_run_workers() -> None:
    check_python(find_python(sys.executable), [], environment())


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "install the same version in both"),
        ({"version": "0.0.1"}, "has rolloutbus 0.0.1 with protocol 1, and .* install the same"),
        ({"missing": ["sglang"]}, "the fleet needs sglang, which .*other does not have"),
    ],
)
def test_another_rolloutbus_or_a_missing_package_is_refused(
    tmp_path: Path, other: dict[str, object], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        check_python(says(tmp_path / "other", **other), ["sglang"], environment())


def test_a_package_that_is_missing_there_is_named() -> None:
    with pytest.raises(SettingsError, match="the fleet needs no_such_package, which"):
        check_python(sys.executable, ["no_such_package"], environment())


def test_an_interpreter_without_rolloutbus_is_refused(tmp_path: Path) -> None:
    bare = interpreter(tmp_path / "bare", f'exec {sys.executable} -I -S "$@"')
    with pytest.raises(SettingsError, match=r"No module named .* has to be installed there"):
        check_python(bare, [], environment())


def test_what_is_no_interpreter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for wrong in ("/nowhere/python", tmp_path, "no-such-python"):
        with pytest.raises(SettingsError, match=r"python: .* is neither an interpreter nor"):
            FleetSettings(engine="fake", python=wrong)


def test_an_environment_is_known_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    found = FleetSettings(engine="fake", python=tmp_path)
    assert found.python == str(tmp_path / "bin" / "python"), "not what the link points to"


async def test_a_fleet_with_another_rolloutbus_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    other = says(tmp_path / "other", version="0.0.1")
    with pytest.raises(SettingsError, match="install the same version in both"):
        async with rolloutbus.up(engine="fake", python=other):
            pass
    assert os.listdir(tmp_path) == ["other"]  # noqa: PTH208 - names
