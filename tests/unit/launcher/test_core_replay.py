"""What `replay --core` tells people: that all is the same, or the first turn that is not."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Peer, Placement
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.cli.app import app
from rolloutbus.cli.commands.journals.replay import replay_core, settings_in
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.turn_writer import TurnWriter
from rolloutbus.router.events import Received, Ticked
from rolloutbus.router.recording import core_of, recorded
from rolloutbus.router.settings import RouterSettings
from tests.unit.replay.segments import Desk

SETTINGS = RouterSettings("ipc:///r/front", "ipc:///r/back", seed=7)
PEER = Peer(b"a" * 16)


def generate(n: int) -> Entry:
    body = Generate(bytes(16), SamplingParams(max_new_tokens=8))
    place = Placement("default", cost=12)
    return Entry("generate", f"ann/{n}", deadline_ms=60_000, place=place, body=pack(body))


async def written(directory: Path) -> Path:
    """The journal of a router that a client came to, and asked twice."""
    async with TurnWriter(directory, "9.9", pytest.fail) as writer:
        writer.began(SETTINGS, "router-a", "")
        handle = recorded(core_of(SETTINGS, "router-a").handle, writer)
        handle(Ticked(), 100.0)
        handle(Received(PEER, [Entry("hello", body=pack(Hello("client", "ann", "f" * 32)))]), 100.5)
        handle(Received(PEER, [generate(1), generate(2)]), 101.0)
        handle(Ticked(), 102.0)
    return directory


async def test_the_same_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay_core(await written(tmp_path / "j"), [], allow_gaps=False, as_json=False)
    assert capsys.readouterr().out == "4 turns repeated, 0 differ; the journal tells of 1 router\n"


async def test_the_first_turn_that_differs_is_told_with_what_led_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        replay_core(
            await written(tmp_path / "j"), ["queue_limit=1"], allow_gaps=False, as_json=False
        )
    assert ended.value.exit_code == 1
    out, errors = capsys.readouterr()
    summary, where, *told, expected, got = out.splitlines()
    assert summary.startswith("4 turns repeated, ")
    assert where.startswith("first: turn 2 of router 1 (received), record 4, 1.000 s after its ")
    assert told[0] == "  told:     connection of ann"
    assert [line.split()[2] for line in told[1:]] == ["ann/1", "ann/2"]
    assert expected == "  expected: nothing more"
    assert got.startswith("  got:      to ann: refused ann/2 ")
    assert '"code":"busy"' in got
    assert errors == "error: the cores did not do the same\n"


async def test_turns_that_could_not_be_repeated_are_not_said_to_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = JournalSettings(memory_bytes=1, sync_s=3600.0)
    async with TurnWriter(tmp_path / "j", "9.9", lambda _: None, tiny) as writer:
        writer.began(SETTINGS, "router-a", "")
        handle = recorded(core_of(SETTINGS, "router-a").handle, writer)
        for second in range(4):
            handle(Ticked(), 100.0 + second)
    for allow_gaps in (False, True):
        with pytest.raises(typer.Exit) as ended:
            replay_core(tmp_path / "j", [], allow_gaps=allow_gaps, as_json=False)
        assert ended.value.exit_code == 1
        assert "did not do the same" not in capsys.readouterr().err


async def test_damage_stops_it_unless_gaps_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = await written(tmp_path / "j")
    file = next(directory.glob("*.rb?"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for allow_gaps in (False, True):
        with pytest.raises(typer.Exit) as ended:
            replay_core(directory, [], allow_gaps=allow_gaps, as_json=False)
        assert ended.value.exit_code == 1
        assert "no right record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("queue_limit", "NAME=JSON"),
        ("=5", "NAME=JSON"),
        ("queue_limit=five", "NAME=JSON"),
        ("queue_limt=5", "no setting 'queue_limt'; did you mean queue_limit"),
        ("banana=5", "no setting 'banana'; it has frontend, backend"),
        ('queue_limit="5"', "queue_limit: Expected `int`, got `str`"),
        ('leases={"lease": 5}', "leases: Object contains unknown field `lease`"),
    ],
)
def test_what_is_no_setting_is_refused(change: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        settings_in([change])
    result = CliRunner().invoke(app, ["replay", "/nowhere", "--core", "--set", change])
    assert result.exit_code == 2


def test_a_journal_without_turns_is_told_from_a_routers_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Desk(tmp_path / "j").close()
    with pytest.raises(typer.Exit):
        replay_core(tmp_path / "j", [], allow_gaps=False, as_json=False)
    assert "`up --journal DIR` and `router --journal DIR` write" in capsys.readouterr().err
