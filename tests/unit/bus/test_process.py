from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutbus.bus.actor.child import how_it_ended
from rolloutbus.bus.actor.process import ActorExit, announce_ready, read_ready, run_actor
from rolloutbus.bus.wire.errors import PeerLost, SettingsError


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings within settings."""

    n_files: int = 0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an actor that only tests run."""

    port: int
    limits: Limits | None = None
    exit_with_parent: bool = False


async def _serve(settings: Settings) -> ActorExit:
    match settings.port:
        case 1:
            raise SettingsError("port 1 is in use")
        case 2:
            raise PeerLost("the other end is gone")
        case _:
            announce_ready(port=str(settings.port))
            return ActorExit.STOPPED


def test_ready_line_says_where_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    announce_ready(frontend="ipc:///a", backend="ipc:///b")
    line = capsys.readouterr().out
    assert read_ready(line.encode()) == {"frontend": "ipc:///a", "backend": "ipc:///b"}


@pytest.mark.parametrize("line", [b"", b"loading", b"{}", b'{"ready":1}', b'{"ready":{},"a":1}'])
def test_anything_else_that_a_process_prints_is_no_ready_line(line: bytes) -> None:
    assert read_ready(line) is None


@pytest.mark.parametrize(
    ("settings", "status", "complaint"),
    [
        ('{"port": 3}', ActorExit.STOPPED, ""),
        ('{"port": 1}', ActorExit.SETTINGS, "error: port 1 is in use\n"),
        ('{"port": 2}', ActorExit.FAILED, "error: the other end is gone\n"),
        ('{"port": "x"}', ActorExit.SETTINGS, "`$.port`"),
        ('{"prot": 3}', ActorExit.SETTINGS, "unknown field `prot`"),
        ("{", ActorExit.SETTINGS, "error: "),
    ],
)
def test_exit_status_and_one_line_say_how_it_ended(
    settings: str, status: ActorExit, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_actor("demo", Settings, _serve, ["--settings-json", settings]) == status
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") <= 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "error: cannot read {file}: No such file or directory\n"),
        ("{", "error: {file}: Input data was truncated\n"),
        (
            '{"prot": 3}',
            "error: {file}: Object contains unknown field `prot`; did you mean `port`?\n",
        ),
        (
            '{"port": 3, "limits": {"n_file": 1}}',
            (
                "error: {file}: Object contains unknown field `n_file` - at `$.limits`; "
                "did you mean `n_files`?\n"
            ),
        ),
        ('{"banana": 3}', "error: {file}: Object contains unknown field `banana`\n"),
    ],
)
def test_a_wrong_settings_file_is_named_and_the_field_that_was_meant(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.json"
    if content is not None:
        file.write_text(content)
    arguments = ["--settings-file", str(file)]
    assert run_actor("demo", Settings, _serve, arguments) == ActorExit.SETTINGS
    assert capsys.readouterr().err == complaint.replace("{file}", str(file))


def test_settings_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.json").write_text('{"port": 7}')
    arguments = ["--settings-file", str(tmp_path / "s.json")]
    assert run_actor("demo", Settings, _serve, arguments) == ActorExit.STOPPED
    ready: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    assert ready == {"ready": {"port": "7"}}


def test_a_second_router_is_not_told_that_its_key_has_no_rights() -> None:
    assert "another one holds its fleet" in how_it_ended(ActorExit.REJECTED)
    assert "has no rights with its key" in how_it_ended(ActorExit.FORBIDDEN)
