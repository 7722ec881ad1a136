"""A replay is what was there: every subscriber hears the bytes that were recorded."""

import asyncio
import math
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import Fleet, RolloutClient, subscribe
from rolloutbus.bus.actor.ref import worker
from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from rolloutbus.replay.choice import rids_in
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Stream, Tap
from rolloutbus.replay.player import Player, PlayerSettings
from rolloutbus.replay.player_core import THE_TAP, Pace
from rolloutbus.replay.recorder import Recorder
from rolloutbus.replay.stream.events import Finished, GapRepaired, Tokens
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.replay.trajectories import Trajectories
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.types import FleetResult
from tests.integration import recorded_run
from tests.integration.live_fleet import DEADLINE_S, START_S
from tests.integration.raw_subscriber import (
    Frames,
    frames_of_message,
    messages_in,
    received_in_replay,
)
from tests.integration.recorded_run import Recording
from tests.integration.recording_ports import RecordingPorts
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(4 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET = recorded_run.FLEET
AT_ONCE = PlayerSettings(speed=math.inf)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recording(
    fleet: Fleet, token_limit: TokenLimit, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    return await recorded_run.recorded_run(
        fleet, token_limit, tmp_path_factory.mktemp("recording") / "j"
    )


async def test_the_recording_has_a_killed_worker_and_several_versions(recording: Recording) -> None:
    versions = {version for each in recording.rollouts.values() for version, _ in each.version_runs}
    assert len(versions) >= 2
    assert any(each.n_resumed for each in recording.rollouts.values())
    assert set(messages_in(recording.journal)) == {"w0", "w1", THE_TAP}


async def test_every_subscriber_of_a_replay_hears_the_bytes_that_were_recorded(
    recording: Recording,
) -> None:
    heard = await received_in_replay(recording.journal, n_subscribers=3)
    expected = messages_in(recording.journal)
    assert heard.keys() == {"w0", "w1"}
    for name, of_all in heard.items():
        assert len(of_all) == 3
        for messages in of_all:
            assert messages == expected[name]


async def test_a_replay_sends_the_frames_that_the_live_worker_sent(recording: Recording) -> None:
    replayed = messages_in(recording.journal)["w1"]
    starts = [n for n, each in enumerate(recording.live) if each == replayed[0]]
    assert any(recording.live[n : n + len(replayed)] == replayed for n in starts)


async def test_a_recording_of_a_replay_is_the_recording(
    recording: Recording, tmp_path: Path
) -> None:
    received = RecordingPorts()
    records = [each for each in Journal(recording.journal) if isinstance(each, Stream | Tap)]
    n_entries = sum(len(each.entries) for each in records)
    async with Player(Journal(recording.journal), AT_ONCE) as player:
        settings = ClientSettings(name="recorder", router=player.address)
        recorder = Recorder(settings, tmp_path / "again", ports=received.ports)
        async with recorder, asyncio.timeout(DEADLINE_S):
            await player.subscribed(1, n_of_tap=1)
            await player.play()
            await received.until(lambda: len(received.published) >= n_entries)
    first = [each for each in records if isinstance(each, Stream)]
    second = [each for each in Journal(tmp_path / "again") if isinstance(each, Stream)]

    def by_worker(records: list[Stream], name: str) -> list[Frames]:
        of_one = [each for each in records if each.entries[0].route == name]
        return [frames_of_message(each.topic, each.entries) for each in of_one]

    for name in ("w0", "w1"):
        assert by_worker(second, name) == by_worker(first, name)
    exported = {row.rid for row in Trajectories(Journal(tmp_path / "again"))}
    assert exported == {row.rid for row in Trajectories(Journal(recording.journal))}


async def test_the_export_has_a_row_for_each_finished_rollout(recording: Recording) -> None:
    found = Trajectories(Journal(recording.journal))
    rows = {row.rid: row for row in found}
    assert recording.rollouts.keys() <= rows.keys()
    for rid, rollout in recording.rollouts.items():
        assert rows[rid].output_ids.tolist() == rollout.tokens.tolist()
    assert found.requests.n_open == found.requests.n_unfinished == 0


async def test_who_comes_late_gets_all_that_was_played_by_repair(recording: Recording) -> None:
    resumed = next(each for each in recording.rollouts.values() if each.n_resumed)
    rows = [row for row in Trajectories(Journal(recording.journal)) if row.rid == resumed.rid]
    async with Player(Journal(recording.journal), AT_ONCE) as player:
        await player.play()
        settings = ClientSettings(name="late", router=player.address)
        async with RolloutClient(settings) as client:
            attempt = last_attempt(recording.journal, resumed.rid)
            ask = Ask("repair", Repair(resumed.rid, attempt, 0), route=worker(resumed.worker))
            result = await client.connection.ask(ask, DEADLINE_S)
    assert isinstance(result, FleetResult)
    found = result.by_worker[resumed.worker]
    assert isinstance(found, Repaired)
    assert found.tokens == resumed.tokens.tobytes()
    assert found.logprobs == resumed.logprobs.tobytes()
    assert found.versions == list(resumed.version_runs)
    assert len(rows) == 1


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_subscriber_that_comes_in_the_middle_gets_its_streams_whole(
    recording: Recording, is_resumed: bool
) -> None:
    streamed = [rid for rid in recording.rollouts if rid not in recording.last]
    rid = next(rid for rid in streamed if bool(recording.rollouts[rid].n_resumed) == is_resumed)
    async with Player(Journal(recording.journal), AT_ONCE) as player:
        await player.play(until_s=middle_of(recording.journal, rid))
        settings = ClientSettings(name="late", router=player.address)
        async with Subscriber(settings, rids=[rid]) as subscriber, asyncio.timeout(DEADLINE_S):
            await player.subscribed(1)
            await player.play()
            events = [await anext(subscriber)]
            while not (isinstance(events[-1], Finished) and events[-1].finish_reason == "length"):
                events.append(await anext(subscriber))
    assert any(isinstance(event, GapRepaired) for event in events)
    rollout = recording.rollouts[rid]
    assert events[-1].tokens.tolist() == rollout.tokens.tolist()
    assert events[-1].version_runs == list(rollout.version_runs)
    assert player.playback.n_repairs > 0


def middle_of(journal: Path, rid: str) -> float:
    """When the first rows of a request had been recorded, and no more."""
    pace = Pace()
    for record in Journal(journal):
        at_s = pace.at_s(record)
        if isinstance(record, Stream):
            rows = [entry for entry in record.entries if entry.kind == "deltas"]
            if any(rid in rids_in(entry) for entry in rows):
                return at_s
    raise AssertionError(f"no rows of {rid}")


def last_attempt(journal: Path, rid: str) -> tuple[int, int]:
    return next(
        entry.attempt
        for record in Journal(journal)
        if isinstance(record, Tap) and record.event == "received"
        for entry in record.entries
        if entry.kind == "finished" and entry.rid == rid
    )


async def test_one_request_can_be_replayed_alone(recording: Recording) -> None:
    rid = recording.last[0]
    chosen = PlayerSettings(speed=math.inf, rids=frozenset({rid}))
    rollout = recording.rollouts[rid]
    async with (
        Player(Journal(recording.journal), chosen) as player,
        subscribe(player.address) as subscriber,
        asyncio.timeout(DEADLINE_S),
    ):
        await player.subscribed(1)
        await player.play()
        async for event in subscriber:
            if isinstance(event, Tokens | Finished):
                assert event.rid == rid
            if isinstance(event, Finished):
                assert event.tokens.tolist() == rollout.tokens.tolist()
                break
