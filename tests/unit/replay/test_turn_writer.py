"""What a router's core was told is written down, and a fresh core repeats it to the letter."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.streams.tap import Outcome, Stimulus
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Peer, Placement
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Record, Router, TurnRecord, payload_of, record_in
from rolloutbus.replay.turn_player import CorePlayer, text_of
from rolloutbus.replay.turn_writer import TurnWriter
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import (
    Counted,
    Effect,
    Event,
    Handle,
    KeysChanged,
    LettersKept,
    Malformed,
    Received,
    Returned,
    Revoked,
    Ticked,
)
from rolloutbus.router.recording import core_of, event_of, recorded, repeat, stimulus_of
from rolloutbus.router.settings import RouterSettings

SETTINGS = RouterSettings("ipc:///r/front", "ipc:///r/back", seed=7)
PEER, OTHER = Peer(b"a" * 16), Peer(b"b" * 16)
HELLO = Entry("hello", body=pack(Hello("client", "trainer", "f" * 32)))
PRINCIPAL = Principal("0" * 64, "trainer", "trainer")
LARGE = 40_000


def generate(n: int, n_prompt_tokens: int = 4) -> Entry:
    body = Generate(bytes(4 * n_prompt_tokens), SamplingParams(max_new_tokens=8))
    place = Placement("default", cost=12)
    return Entry("generate", f"trainer/{n}", deadline_ms=60_000, place=place, body=pack(body))


def drive(handle: Handle) -> None:
    """A bit of everything."""
    handle(Ticked(), 0.0)
    handle(Received(PEER, [HELLO]), 0.5)
    handle(Received(PEER, [generate(1), generate(2, LARGE)]), 1.0)
    handle(Counted("turned_away", 3), 1.0)
    handle(Received(OTHER, [Entry("nonsense")], PRINCIPAL), 1.5)
    handle(Malformed(OTHER), 2.0)
    handle(Returned(PEER, [generate(3)]), 2.5)
    handle(Received(PEER, [Entry("status", "trainer/9", deadline_ms=1000)]), 3.0)
    handle(Revoked([PEER, OTHER], "forbidden"), 3.5)
    handle(LettersKept(), 4.0)
    handle(Ticked(), 100.0)


class Notes:
    """Keeps turns as records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def began(self, settings: RouterSettings, instance: str, tap: str) -> None:
        text = msgspec.json.encode(settings).decode()
        self.records.append(Router(0, 0, "1", text, instance, tap))

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        n = sum(isinstance(each, TurnRecord) for each in self.records)
        self.records.append(TurnRecord(len(self.records), 0, n, stimulus, outcome))


def turns_of(settings: RouterSettings = SETTINGS) -> list[Record]:
    notes = Notes()
    notes.began(settings, "router-a", "")
    drive(recorded(core_of(settings, "router-a").handle, notes))
    return notes.records


def played(records: list[Record], settings: RouterSettings = SETTINGS) -> CorePlayer:
    player = CorePlayer(lambda router: partial(repeat, core_of(settings, router.instance).handle))
    for each in records:
        player.play(each)
    return player


async def test_a_core_repeats_what_is_written_of_another(tmp_path: Path) -> None:
    problems: list[str] = []
    async with TurnWriter(tmp_path / "j", "1.2", problems.append) as writer:
        for _ in range(2):  # one router after the other
            writer.began(SETTINGS, "router-a", "")
            drive(recorded(core_of(SETTINGS, "router-a").handle, writer))
    player = played(list(Journal(tmp_path / "j")))
    assert problems == []
    assert (player.n_routers, player.n_turns) == (2, 22)
    assert player.is_same


def test_every_kind_of_turn_is_told_and_repeated() -> None:
    records = turns_of()
    events = [each.stimulus.event for each in records if isinstance(each, TurnRecord)]
    assert events == [
        *("tick", "received", "received", "counted", "signed", "malformed", "undelivered"),
        *("received", "revoked", "letters", "tick"),
    ]
    assert played(records).is_same


EVENTS: list[Event] = [
    Received(PEER, [HELLO, generate(1)]),
    Received(PEER, [HELLO], PRINCIPAL),
    Returned(PEER, [generate(2)]),
    Malformed(PEER),
    Revoked([PEER, OTHER], "unknown-peer"),
    Ticked(),
    Counted("turned_away", 3),
    LettersKept(),
    KeysChanged([PRINCIPAL]),
]


def test_every_event_that_a_core_can_be_told_comes_back_from_a_journal() -> None:
    assert {type(each) for each in EVENTS} == set(get_args(Event))
    for n, event in enumerate(EVENTS):
        turn = TurnRecord(1, 0, n, stimulus_of(event, 7.5), Outcome([]))
        read = record_in(payload_of(turn))
        assert isinstance(read, TurnRecord)
        assert (read.stimulus.at, event_of(read.stimulus)) == (7.5, event)


def test_another_setting_shows_at_the_first_turn_that_depends_on_it() -> None:
    other = msgspec.structs.replace(SETTINGS, queue_limit=1)
    player = played(turns_of(), other)
    assert player.first is not None
    assert (player.first.router, player.first.turn.n, player.first.since_s) == (1, 2, 1.0)
    told = text_of(player.first, player.names)
    assert told.told[0] == "connection of trainer"
    assert "generate trainer/1 deadline_ms 60000" in told.told[1]
    assert told.expected == ["nothing more"]
    assert told.got[0].startswith("to trainer: refused trainer/2 ")


def test_what_only_the_shell_has_seen_shows_in_what_the_core_says_later() -> None:
    records = turns_of()
    forgotten = [
        msgspec.structs.replace(
            each, stimulus=msgspec.structs.replace(each.stimulus, count=each.stimulus.count + 1)
        )
        if isinstance(each, TurnRecord) and each.stimulus.event == "counted"
        else each
        for each in records
    ]
    player = played(forgotten)
    assert player.first is not None
    assert player.first.turn.stimulus.entries[0].kind == "status"


def test_large_bodies_of_effects_are_named_by_their_digest() -> None:
    def echo(size: int) -> tuple[Outcome, Outcome]:
        outcomes: list[Outcome] = []
        notes = Notes()
        for fill in (b"x", b"y"):
            core = core_of(SETTINGS, "r")
            core.handle(Ticked(), 0.0)
            body = msgspec.Raw(msgspec.msgpack.encode({"a": fill * size}))
            core.context.out.send(PEER, Entry("echo", body=body))
            recorded(core.handle, notes)(Ticked(), 0.1)
            last = notes.records[-1]
            assert isinstance(last, TurnRecord)
            outcomes.append(last.outcome)
        one, other = outcomes
        return one, other

    one, other = echo(LARGE)
    assert one != other
    assert len(msgspec.msgpack.encode(one)) < 200


class Broken:
    """A core with a bug."""

    def __init__(self, at: float) -> None:
        self.core = core_of(SETTINGS, "router-a")
        handle = self.core.handle

        def handle_or_crash(event: Event, now: float) -> list[Effect]:
            if now >= at:
                raise KeyError("no such worker")
            return handle(event, now)

        self.core.handle = handle_or_crash  # type: ignore[method-assign]


def test_the_turn_that_crashed_a_router_is_the_last_one_written_and_crashes_again() -> None:
    notes = Notes()
    notes.began(SETTINGS, "router-a", "")
    handle = recorded(Broken(5.0).core.handle, notes)
    handle(Ticked(), 0.0)
    with pytest.raises(KeyError):
        handle(Ticked(), 5.0)
    last = notes.records[-1]
    assert isinstance(last, TurnRecord)
    assert last.outcome.crash == "KeyError: 'no such worker'"

    def begin(make: Callable[[], RouterCore]) -> CorePlayer:
        player = CorePlayer(lambda _: partial(repeat, make().handle))
        for each in notes.records:
            player.play(each)
        return player

    assert begin(lambda: Broken(5.0).core).is_same
    mended = begin(lambda: core_of(SETTINGS, "router-a"))
    assert mended.first is not None
    assert text_of(mended.first, {}).expected == ["it crashed: KeyError: 'no such worker'"]
    worse = begin(lambda: Broken(0.0).core)
    assert worse.first is not None
    assert (worse.first.turn.n, worse.n_unplayable) == (0, 1)


def test_after_a_hole_nothing_is_repeated_until_the_next_router() -> None:
    records = turns_of()
    holed = [each for each in records if not isinstance(each, TurnRecord) or each.n != 4]
    player = played([*holed, *records])
    assert (player.n_turns, player.n_different, player.n_unplayable) == (4 + 11, 0, 6)
    assert not player.is_same


def test_turns_before_any_router_are_not_repeated() -> None:
    player = played(turns_of()[1:])
    assert (player.n_turns, player.n_unplayable, player.is_same) == (0, 11, False)


async def test_a_disk_that_is_too_slow_is_told_once_and_stops_no_router(tmp_path: Path) -> None:
    problems: list[str] = []
    tiny = JournalSettings(memory_bytes=1, sync_s=3600.0)
    async with TurnWriter(tmp_path / "j", "1.2", problems.append, tiny) as writer:
        writer.began(SETTINGS, "router-a", "")
        drive(recorded(core_of(SETTINGS, "router-a").handle, writer))
    assert problems == ["the router's journal has a hole: the disk is too slow"]
    assert not played(list(Journal(tmp_path / "j"))).is_same


async def test_a_full_disk_costs_turns_and_the_journal_goes_on_when_there_is_room(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    news = asyncio.Queue[str]()

    def begin() -> TurnWriter:
        return TurnWriter(tmp_path / "j", "9.9", news.put_nowait, retry_s=0.01)

    def tick(writer: TurnWriter) -> None:
        writer.turn(Stimulus("tick", 1.0), Outcome([]))

    async with asyncio.timeout(60):
        async with begin() as writer:
            writer.began(SETTINGS, "router-a", "")
            tick(writer)
            with full_disk():
                tick(writer)
                assert "a hole from now on: File too large" in await news.get()
                for _ in range(5):
                    tick(writer)
            assert "goes on; " in await news.get()
            tick(writer)
        with full_disk():  # and the next router begins all the same
            another = await begin().__aenter__()
            assert "a hole from now on: " in await news.get()
            another.began(SETTINGS, "router-b", "")
            tick(another)
        assert "goes on; 2 turns before that are missing" in await news.get()
        tick(another)
        await another.__aexit__()

    journal = Journal(tmp_path / "j")
    turns = [each.n for each in journal if isinstance(each, TurnRecord)]
    assert turns[-2:] == [7, 1]
    assert [each.kind for each in journal.gaps if each.kind == "lost"] == ["lost"]
    player = CorePlayer(lambda _: lambda _: Outcome([]))
    for record in journal:
        player.play(record)
    assert player.n_unplayable == 2


async def test_a_last_write_that_fails_is_told_and_not_tried_again(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    news: list[str] = []
    late = JournalSettings(sync_s=3600.0)  # nothing is written before the end
    writer = await TurnWriter(tmp_path / "j", "9.9", news.append, late).__aenter__()
    writer.turn(Stimulus("tick", 1.0), Outcome([]))
    with full_disk():
        await writer.__aexit__()
    assert news == ["the router's journal lacks its end: File too large"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with TurnWriter(tmp_path / "j", "9.9", pytest.fail):
        pass


async def test_a_writer_that_is_closed_on_a_full_disk_leaves_the_directory_to_the_next(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    news = asyncio.Queue[str]()
    writer = await TurnWriter(tmp_path / "j", "9.9", news.put_nowait).__aenter__()
    writer.turn(Stimulus("tick", 1.0), Outcome([]))
    with full_disk():
        async with asyncio.timeout(60):
            assert "a hole from now on: " in await news.get()
        await writer.__aexit__()
    async with TurnWriter(tmp_path / "j", "9.9", pytest.fail):
        pass
