"""Commands that read a journal say what of it is missing, and end with 1 unless that is allowed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutbus.cli.app import app
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.files import segments_in
from rolloutbus.replay.journal.format import Found, JournalError, framer_of, scan
from rolloutbus.replay.journal.records import Tap
from rolloutbus.replay.offline import OfflineRollouts
from rolloutbus.replay.turn_writer import TurnWriter
from rolloutbus.router.events import Ticked
from rolloutbus.router.recording import core_of, recorded
from rolloutbus.router.settings import RouterSettings
from tests.unit.replay.segments import Desk
from tests.unit.replay.streams import asked, ended

N_ROLLOUTS = 24


def recording(directory: Path, n_lost: int = 0) -> None:
    """A journal of several segments, packed, with so many rollouts."""
    desk = Desk(directory, JournalSettings(segment_bytes=2_000), packs=True)
    for number in range(N_ROLLOUTS):
        desk.append(Tap, "received", 2 * number, 1.0, 1, "c", [asked(f"c/{number}")])
        desk.append(Tap, "sent", 2 * number + 1, 1.0, 1, "c", [ended(f"c/{number}", 5)])
        desk.flush()
    for _ in range(n_lost):
        desk.core.n_dropped += 1
    desk.close()


def drop_first(directory: Path) -> None:
    segments_in(directory)[0].path.unlink()


def drop_middle(directory: Path) -> None:
    segments_in(directory)[1].path.unlink()


def drop_last(directory: Path) -> None:
    segments_in(directory)[-1].path.unlink()


def shorten_sealed(directory: Path) -> None:
    """At the boundary of a record, where its end would begin."""
    file = segments_in(directory)[-1].path
    content = file.read_bytes()
    framer = framer_of(content)
    assert framer is not None
    *_, end = [each for each in scan(framer, content) if isinstance(each, Found)]
    file.write_bytes(content[: end.offset])


CUTS = [drop_first, drop_middle, drop_last, shorten_sealed]


def invoked(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
@pytest.mark.parametrize(("verb", "option"), [("export", "--output"), ("timeline", "-o")])
def test_what_is_missing_is_said_and_ends_with_1(
    tmp_path: Path, verb: str, option: str, cut: Callable[[Path], None]
) -> None:
    recording(tmp_path / "j")
    made = tmp_path / ("rows.jsonl" if verb == "export" else "page.html")
    command = [verb, tmp_path / "j", option, made]
    status, told, errors = invoked(*command, "--json")
    assert (status, errors) == (0, "")
    assert json.loads(told)["gaps"] == []

    cut(tmp_path / "j")

    status, _, errors = invoked(*command)
    assert status == 1
    assert "error: " in errors
    status, told, errors = invoked(*command, "--allow-gaps", "--json")
    assert status == 0
    (gap,) = json.loads(told)["gaps"]
    assert errors == f"{gap['kind']}: {gap['sentence']}\n"
    if verb == "export" and cut in (drop_first, drop_middle):
        assert 0 < json.loads(told)["rows"] < N_ROLLOUTS


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_training_from_it_ends_with_an_error(tmp_path: Path, cut: Callable[[Path], None]) -> None:
    recording(tmp_path / "j")
    assert len(list(OfflineRollouts(tmp_path / "j"))) == N_ROLLOUTS
    cut(tmp_path / "j")
    with pytest.raises(JournalError, match=r"is not there|says that another|sealed"):
        list(OfflineRollouts(tmp_path / "j"))
    assert list(OfflineRollouts(tmp_path / "j", allow_gaps=True))


def test_a_journal_without_a_tap_is_not_taken_for_one_without_rollouts(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "j")
    desk.add("c/1")
    desk.close()
    command = ["export", tmp_path / "j", "-o", tmp_path / "rows.jsonl", "--json"]
    for more, expected in ((), 1), (("--allow-gaps",), 0):
        status, told, errors = invoked(*command, *more)
        assert (status, json.loads(told)["lacks_tap"]) == (expected, True)
        assert "holds no messages of a router's tap" in errors
    with pytest.raises(JournalError, match="up --tap"):
        list(OfflineRollouts(tmp_path / "j"))
    assert list(OfflineRollouts(tmp_path / "j", allow_gaps=True)) == []


async def test_a_router_that_died_leaves_a_journal_without_an_end(tmp_path: Path) -> None:
    async with TurnWriter(tmp_path / "j", "9.9", pytest.fail) as writer:
        settings = RouterSettings("ipc:///r/front", "ipc:///r/back", seed=7)
        writer.began(settings, "router-a", "")
        handle = recorded(core_of(settings, "router-a").handle, writer)
        for second in range(5):
            handle(Ticked(), 100.0 + second)
    (file,) = [each.path for each in segments_in(tmp_path / "j")]
    command = ["replay", tmp_path / "j", "--core"]
    assert invoked(*command)[0] == 0

    file.write_bytes(file.read_bytes()[:-30])

    status, _, errors = invoked(*command)
    assert (status, "000001.rbz" in errors) == (1, True)
    status, told, errors = invoked(*command, "--allow-gaps", "--json")
    assert (status, json.loads(told)["is_same"]) == (0, True)
    assert "damage: " in errors
