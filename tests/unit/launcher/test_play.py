"""`rolloutbus play`: a recording on a terminal, and what its keys do."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rolloutbus.cli.app import app
from rolloutbus.cli.commands.journals.play import SKIP_S, Playhead, Show
from rolloutbus.cli.commands.tail import ids_of
from rolloutbus.cli.keyboard import keys_in
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.journal.records import Record, Stream
from rolloutbus.replay.scenes import Scene, scenes
from rolloutbus.replay.stream.events import Finished, GapLost, Tokens
from tests.unit.replay.segments import Desk
from tests.unit.replay.streams import TOPIC, published, row, step, stream

RID, OTHER, A = "c/1", "c/2", (1, 1)
RECORDS = [
    stream(0, row(RID, A, 0, 7, 8), at_ms=0),
    stream(1, row(OTHER, A, 0, 5), at_ms=4_000),
    stream(2, step(row(RID, A, 2, 9), finishes=[(0, "stop")]), at_ms=20_000),
]


def film() -> Iterator[Scene]:
    return scenes(RECORDS)


def show(head: Playhead, source: Callable[[], Iterator[Scene]] = film) -> Show:
    return Show(source, head, ids_of)


def open_streams(shown: Show) -> dict[str, list[int]]:
    return {rid: each.tokens for rid, each in shown.texts.open.items()}


def test_scenes_have_what_a_subscriber_would_have_been_told_and_when() -> None:
    times, events = zip(*film(), strict=True)
    assert times == (0.0, 4.0, 20.0)
    [[first], [second], [third, end]] = events
    assert isinstance(first, Tokens)
    assert (first.tokens.tolist(), second.rid, third.tokens.tolist()) == ([7, 8], OTHER, [9])
    assert isinstance(end, Finished)
    assert (end.tokens.tolist(), end.finish_reason) == ([7, 8, 9], "stop")


def test_what_the_recorder_has_missed_is_told_as_lost_and_not_asked_for() -> None:
    records: list[Record] = [RECORDS[0], stream(1, row(RID, A, 5, 9), at_ms=10)]
    [*_, last] = scenes(records)
    assert [(each.start, each.stop) for each in last.events if isinstance(each, GapLost)] == [
        (2, 5)
    ]


@pytest.mark.parametrize(
    ("wanted", "rids", "found"),
    [
        (Filter(), [OTHER], [OTHER]),
        (Filter(client=["c"]), [], [RID, OTHER, RID]),
        (Filter(client=["d"]), [], []),
    ],
)
def test_streams_may_be_chosen(wanted: Filter, rids: list[str], found: list[str]) -> None:
    events = [each for scene in scenes(RECORDS, wanted, rids) for each in scene.events]
    assert [each.rid for each in events if isinstance(each, Tokens)] == found


def test_keys_of_a_terminal_are_told_apart() -> None:
    assert keys_in("a\x1b[A\x1b[B q\x1bOC\x1b[D") == ["a", "up", "down", " ", "q", "right", "left"]
    assert keys_in("\x1b[H") == []


def test_space_pauses_and_arrows_change_the_speed() -> None:
    head = Playhead(100.0, 1.0)
    head.press("up")
    head.advance(3.0)
    assert (head.speed, head.position_s) == (2.0, 6.0)
    head.press(" ")
    head.advance(3.0)
    assert head.position_s == 6.0
    for key in (" ", "down", "down"):
        head.press(key)
    head.advance(2.0)
    assert (head.speed, head.position_s) == (0.5, 7.0)
    head.press("q")
    assert head.is_over


def test_one_can_go_on_and_back_within_the_recording() -> None:
    head = Playhead(8.0, 1.0)
    head.press("left")
    assert head.position_s == 0.0
    head.press("right")
    assert head.position_s == SKIP_S
    head.press("right")
    assert head.position_s == 8.0


def test_streams_stand_as_they_stood_also_after_going_back() -> None:
    head = Playhead(20.0, 1.0)
    shown = show(head)
    head.move(4.0)
    assert shown.catch_up() == []
    assert open_streams(shown) == {RID: [7, 8], OTHER: [5]}
    head.move(16.0)
    [said] = shown.catch_up()
    assert said.startswith("c/1 (w0, v0, 3 tokens, stop)")
    assert open_streams(shown) == {OTHER: [5]}
    assert shown.is_at_end
    head.move(-19.0)
    assert shown.catch_up() == []
    assert open_streams(shown) == {RID: [7, 8]}


def test_a_paused_recording_goes_on_step_by_step() -> None:
    head = Playhead(20.0, 1.0)
    shown = show(head)
    shown.catch_up()
    for key in (" ", "right"):
        head.press(key)
    shown.catch_up()
    assert (head.position_s, open_streams(shown)) == (4.0, {RID: [7, 8], OTHER: [5]})


def test_the_playhead_fits_a_narrow_terminal() -> None:
    shown = show(Playhead(20.0, 1.0))
    shown.catch_up()
    console = Console(width=40, force_terminal=False)
    with console.capture() as captured:
        console.print(shown.drawn(40))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 40
    assert any("0.0 of 20.0 s | 1 times as fast" in line for line in lines)


def recording(directory: Path) -> None:
    desk = Desk(directory)
    for body in (row(RID, A, 0, 7), step(row(RID, A, 1, 9), finishes=[(0, "stop")])):
        desk.append(partial(Stream), TOPIC, [published(body)])
        desk.flush()
    desk.close()


def test_the_command_prints_endings_without_a_terminal_and_events_as_json(tmp_path: Path) -> None:
    recording(tmp_path / "j")
    cli = CliRunner()
    said = cli.invoke(app, ["play", str(tmp_path / "j"), "--speed", "max"])
    assert (said.exit_code, said.stdout) == (0, "c/1 (w0, v0, 2 tokens, stop)\n7,9\n")
    told = cli.invoke(app, ["play", str(tmp_path / "j"), "--speed", "max", "--json"])
    events = [json.loads(line) for line in told.stdout.splitlines()]
    assert [each["event"] for each in events] == ["tokens", "tokens", "finished"]
    assert events[-1]["tokens"] == [7, 9]


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ("/nowhere", 1, "error: /nowhere holds no journal"),
        ("/nowhere --speed 0", 2, "neither a number above 0 nor 'max'"),
    ],
)
def test_mistakes_are_told(arguments: str, status: int, complaint: str) -> None:
    result = CliRunner().invoke(app, ["play", *arguments.split()])
    assert (result.exit_code, complaint in result.stderr) == (status, True)
