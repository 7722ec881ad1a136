"""`rolloutbus replay` says in one line what is wrong, and how far it has come."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.cli.app import app
from rolloutbus.cli.commands.journals.replay import line_of
from rolloutbus.replay.journal.records import Stream, Tap
from rolloutbus.replay.player import Playback
from tests.unit.replay.segments import Desk
from tests.unit.replay.streams import TOPIC, asked, ended, published, row

PLAYBACK = Playback(1_204, 2_000, 3.14, 9.0, 2, 1, 0, 0.0, is_held_up=False)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """One request, and one message of a worker."""
    desk = Desk(tmp_path / "j")
    for event, entry in (("received", asked("c/1")), ("sent", ended("c/1", 5))):
        desk.append(Tap, event, 0, 1.0, 1, "c", [entry])
    desk.append(Stream, TOPIC, [published(row("c/1", (1, 1), 0, 5))])
    desk.close()
    return tmp_path / "j"


def complaint(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ("--speed fast", 2, "error: speed: 'fast' is neither a number above 0 nor 'max'"),
        ("--speed 0", 2, "error: speed: '0' is neither a number above 0 nor 'max'"),
        ("--bind tcp://0.0.0.0:7878", 2, "error: tcp://0.0.0.0:7878: without keys only ipc://"),
        ("--bind udp://x", 2, "error: udp://x: only ipc://PATH and tcp://HOST:PORT may be used\n"),
        ("--regenerate --version newest --address ipc:///tmp/nowhere", 2, "is no version rule"),
        ("--regenerate --address ipc:///tmp/nowhere", 3, "error: no router answers at ipc:///tmp/"),
    ],
)
def test_what_is_wrong_is_one_line(journal: Path, options: str, status: int, words: str) -> None:
    code, told = complaint(journal, *options.split())
    assert (code, words in told, told.count("\n")) == (status, True, 1)


def test_what_is_no_journal_or_has_no_streams_cannot_be_played(tmp_path: Path) -> None:
    code, told = complaint(tmp_path)
    assert (code, told) == (1, f"error: {tmp_path} holds no journal\n")
    Desk(tmp_path / "empty").close()
    code, told = complaint(tmp_path / "empty")
    assert (code, told) == (2, f"error: {tmp_path / 'empty'} holds no streams to play\n")


def test_the_line_tells_how_far_it_has_come() -> None:
    assert line_of(PLAYBACK) == (
        "1,204 of 2,000 messages | 3.1 of 9.0 s | 2 subscriptions, 0 repairs"
    )


def test_the_line_tells_why_nothing_moves() -> None:
    assert line_of(PLAYBACK._replace(is_held_up=True)).endswith(" | held up by a slow subscriber")
    assert line_of(PLAYBACK._replace(n_subscriptions=0)).endswith("nobody listens to every stream")


def test_what_cannot_be_compared_is_refused_before_any_router_is_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "j")
    for event, entry in (("received", asked("c/1", SamplingParams())), ("sent", ended("c/1", 5))):
        desk.append(Tap, event, 0, 1.0, 1, "c", [entry])
    desk.close()
    status, said = complaint(tmp_path / "j", "--regenerate", "--address", "tcp://127.0.0.1:1")
    assert status == 2
    assert "all 1 requests were drawn without a seed" in said
    assert "--score" in said
