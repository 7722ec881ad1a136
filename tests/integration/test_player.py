"""A player keeps the times of a recording, and waits for whoever cannot follow."""

import asyncio
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import zmq

from rolloutbus import RolloutClient, connect, subscribe
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import Idle
from rolloutbus.bus.wire.messages.membership import Member, Members
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Stream, ToldRecord
from rolloutbus.replay.player import SOONER_S, Player, PlayerSettings
from rolloutbus.replay.stream.events import Finished, GapLost, GapRepaired, StreamEvent
from rolloutbus.replay.subscriber import Subscriber
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.raw_subscriber import RawSubscriber, messages_in
from tests.unit.replay.segments import MS, Desk
from tests.unit.replay.streams import TOPIC, published, row, step

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PACE_S = 0.001
WORKER = Member("w0", "e.1", "ipc:///gone/w0", "ready", 0, "p")
LARGE = published(Idle([f"c/{10**15 + n}" for n in range(200)], [(1, 1)] * 200, [7] * 200))


def journal(directory: Path, entries: Iterable[Entry], apart_ms: int = 0) -> Path:
    desk = Desk(directory / "j")
    desk.append(ToldRecord, [Entry("members", body=pack(Members([WORKER])))])
    for entry in entries:
        desk.append(Stream, TOPIC, [entry])
        desk.now_ns += apart_ms * MS
    desk.close()
    return directory / "j"


def stream_of(client: RolloutClient) -> str:
    (member,) = client.connection.members
    return member.stream


async def test_no_message_comes_before_its_time(tmp_path: Path) -> None:
    rows = [published(row("c/1", (1, 1), seq, 5)) for seq in range(4)]
    path = journal(tmp_path, rows, apart_ms=400)
    clock = BootClock()
    async with Player(Journal(path), PlayerSettings(speed=4.0)) as player:
        assert round(player.playback.length_s, 3) == 1.6
        async with connect(player.address, name="subscriber") as client:
            subscriber = RawSubscriber(stream_of(client))
            async with asyncio.timeout(DEADLINE_S):
                await player.subscribed(2)
                began_at = clock.now()
                playing = asyncio.create_task(player.play())
                for n in range(4):
                    await subscriber.has_received(n + 1)
                    assert clock.now() - began_at >= 0.1 * n - SOONER_S
                await playing
            subscriber.close()


async def test_a_replay_that_was_stopped_goes_on_with_the_message_it_waited_for(
    tmp_path: Path,
) -> None:
    rows = [published(row("c/1", (1, 1), seq, 5)) for seq in range(3)]
    path = journal(tmp_path, rows, apart_ms=400)
    async with (
        asyncio.timeout(DEADLINE_S),
        Player(Journal(path), PlayerSettings()) as player,
        connect(player.address, name="subscriber") as client,
    ):
        subscriber = RawSubscriber(stream_of(client))
        await player.subscribed(2)
        for n in range(2):
            playing = asyncio.create_task(player.play())
            await subscriber.has_received(n + 1)
            playing.cancel()
            await asyncio.wait([playing])
        await player.play()
        await subscriber.has_received(player.playback.n_played)
        subscriber.close()
    assert subscriber.messages == messages_in(path)["w0"]


@pytest.mark.parametrize("linger_s", [DEADLINE_S, 0.0])
async def test_a_player_that_has_ended_still_repairs_what_a_subscriber_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linger_s: float
) -> None:
    # A busy subscriber may ask late: this player goes on until it has what it wants, and leaves.
    monkeypatch.setattr("rolloutbus.replay.player.QUIET_S", math.inf)
    rows = [published(row("c/1", (1, 1), seq, seq)) for seq in range(3)]
    path = journal(
        tmp_path,
        [*rows, published(step(row("c/1", (1, 1), 3, 3), finishes=[(0, "stop")]))],
        apart_ms=100,
    )
    player = Player(Journal(path), PlayerSettings(speed=math.inf, linger_s=linger_s))
    events: list[StreamEvent] = []

    async def read(subscriber: Subscriber) -> None:
        while not events or not isinstance(events[-1], Finished):
            events.append(await anext(subscriber))
        await subscriber.close()

    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as tasks, player:
        await player.play(until_s=0.15)
        subscriber = await subscribe(player.address).open()
        await player.subscribed(1)
        await player.play()
        tasks.create_task(read(subscriber))
    missed = [type(each) for each in events if isinstance(each, GapRepaired | GapLost)]
    assert missed == [GapRepaired if linger_s else GapLost]
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.tokens.tolist() == ([0, 1, 2, 3] if linger_s else [2, 3])


async def test_a_player_waits_for_no_more_repairs_than_it_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it would wait until the subscriber leaves, which is after its end here.
    monkeypatch.setattr("rolloutbus.replay.player.QUIET_S", math.inf)
    path = journal(tmp_path, [published(row("c/1", (1, 1), 0, 5))])
    settings = PlayerSettings(speed=math.inf, linger_s=0.3)
    async with asyncio.timeout(DEADLINE_S):
        async with Player(Journal(path), settings) as player:
            subscriber = await subscribe(player.address).open()
            await player.subscribed(1)
            await player.play()
            ended_at = BootClock().now()
        assert BootClock().now() - ended_at >= 0.3
        await subscriber.close()
    with pytest.raises(SettingsError, match="linger_s"):
        PlayerSettings(linger_s=-1.0)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["played", "stopped"])
async def test_a_subscriber_that_reads_nothing_holds_the_replay_up_and_misses_nothing(
    tmp_path: Path, is_stopped: bool
) -> None:
    path = journal(tmp_path, [LARGE] * 5_000)
    async with (
        Player(Journal(path), PlayerSettings(speed=math.inf)) as player,
        connect(player.address, name="subscriber") as client,
    ):
        slow = new_socket(zmq.SUB)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.SUBSCRIBE, b"")
        slow.setsockopt(zmq.RCVTIMEO, int(1_000 * DEADLINE_S))
        slow.connect(stream_of(client))
        quick = RawSubscriber(stream_of(client))
        async with asyncio.timeout(DEADLINE_S):
            await player.subscribed(3)
            playing = asyncio.create_task(player.play())
            n_before = -1
            while not player.playback.is_held_up or player.playback.n_played > n_before:
                n_before = player.playback.n_played
                await asyncio.sleep(PACE_S)  # nobody is told that it is held up
        assert player.playback.n_played < 5_000
        if is_stopped:
            playing.cancel()
            await asyncio.wait([playing], timeout=DEADLINE_S)
            playing = asyncio.create_task(player.play())
        expected = messages_in(path)["w0"]
        heard = await asyncio.to_thread(lambda: [slow.recv_multipart() for _ in expected])
        async with asyncio.timeout(DEADLINE_S):
            await playing
            await quick.has_received(5_000)
        assert heard == quick.messages == expected
        assert player.playback.held_up_s > 0
        quick.close()
        slow.close()
