from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutbus.bus.actor.child import how_it_ended
from rolloutbus.bus.actor.process import ActorExit, announce_ready, read_ready, run_actor
from rolloutbus.bus.wire.errors import PeerLost, SettingsError


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an actor that only tests run."""

    port: int
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


def test_settings_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.json").write_text('{"port": 7}')
    arguments = ["--settings-file", str(tmp_path / "s.json")]
    assert run_actor("demo", Settings, _serve, arguments) == ActorExit.STOPPED
    ready: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    assert ready == {"ready": {"port": "7"}}


def test_a_second_router_is_not_told_that_its_key_has_no_rights() -> None:
    assert "another one holds its fleet" in how_it_ended(ActorExit.REJECTED)
    assert "has no rights with its key" in how_it_ended(ActorExit.FORBIDDEN)
