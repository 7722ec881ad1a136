"""What is read through a forwarder is what workers publish, for those who may read it there."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from msgspec import Raw

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.security.principals import claim_of
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard
from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.transport.zmq_topics import ForwardPort, SubPort
from rolloutbus.bus.wire.codec import encode_batch, topic_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.errors import SettingsError
from rolloutbus.events import Finished, GapLost, Interrupted, WorkerJoined
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.forwarder import Forwarder
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.event_reader import EventReader
from tests.integration.guarded_publisher import GuardedPublisher
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import (
    DEADLINE_S,
    PACE_S,
    PATIENT,
    START_S,
    Streamed,
    fake_sampling,
    serves_at,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake", "store": False, "lease": PATIENT}
ANY = "tcp://127.0.0.1:0"


def named(fleet: Fleet, name: str) -> ClientSettings:
    return ClientSettings(
        name=name,
        router=fleet.address,
        overtime_s=DEADLINE_S,
        connect_timeout_s=DEADLINE_S,
    )


async def test_streams_through_a_forwarder_are_those_of_all_workers(
    fleet: Fleet, client: RolloutClient
) -> None:
    async with Forwarder(named(fleet, "passage"), ANY) as forwarder:
        via = rolloutbus.subscribe(fleet.address, via=forwarder.endpoint)
        async with EventReader(via) as seen:
            await seen.hears(client, n_workers=2)
            rollouts = await asyncio.gather(
                *(
                    client.generate([2, i], fake_sampling(60), deadline_s=DEADLINE_S)
                    for i in range(20)
                )
            )
            for rollout in rollouts:
                await seen.whole(rollout)
            assert {event.worker for event in seen.of(WorkerJoined)} == {"w0", "w1"}


async def test_a_stream_goes_on_through_the_forwarder_that_comes_after(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/f"
    async with EventReader(rolloutbus.subscribe(fleet.address, via=endpoint)) as seen:
        with token_limit.at(30):
            async with Forwarder(named(fleet, "passage"), endpoint):
                await seen.hears(client, n_workers=2)
                streamed = Streamed(client, [3], fake_sampling(80))
                await seen.until(lambda: len(seen.tokens(streamed.rid)) == 30)
            token_limit.move(50)
            await streamed.reached(50)
            async with Forwarder(named(fleet, "passage"), endpoint):
                await seen.until(lambda: len(seen.tokens(streamed.rid)) == 50)
                token_limit.move(80)
                await seen.whole(await streamed.rollout())
        assert not seen.of(GapLost)
        assert seen.of(Interrupted)


async def test_a_worker_that_comes_later_is_forwarded() -> None:
    async with (
        rolloutbus.up(**FLEET) as fleet,
        RolloutClient(named(fleet, "c")) as client,
        Forwarder(named(fleet, "passage"), ANY) as forwarder,
        EventReader(rolloutbus.subscribe(fleet.address, via=forwarder.endpoint)) as seen,
    ):
        await seen.hears(client, n_workers=2)

        def n_joins() -> int:
            return sum(event.worker == "w0" for event in seen.of(WorkerJoined))

        n_before = n_joins()
        fleet.kill("w0")
        await seen.until(lambda: n_joins() > n_before)
        n_told = len(seen.events)

        def comes_from_it() -> bool:
            ends = [event for event in seen.events[n_told:] if isinstance(event, Finished)]
            return "w0" in {end.worker for end in ends}

        async with asyncio.timeout(DEADLINE_S):
            while not comes_from_it():
                await client.generate([5], fake_sampling(9), deadline_s=DEADLINE_S)


async def test_a_fleet_with_keys_is_forwarded_to_who_has_one(tmp_path: Path) -> None:
    options: UpOptions = {**FLEET, "workers": 1, "secure": tmp_path / "k"}
    async with rolloutbus.up(**options) as fleet:
        keys = KeyDirectory(tmp_path / "k")
        keys.add("fwd", "subscriber")
        keys.add("watcher", "subscriber")
        keys.add("ann", "client")

        def settings(name: str) -> ClientSettings:
            return ClientSettings(
                name=name,
                router=fleet.address,
                security=keys.client_settings(name),
                overtime_s=DEADLINE_S,
                connect_timeout_s=DEADLINE_S,
            )

        async with (
            Forwarder(settings("fwd"), ANY, str(keys.allow_list)) as forwarder,
            RolloutClient(settings("ann")) as ann,
            EventReader(Subscriber(settings("watcher"), via=forwarder.endpoint)) as seen,
        ):
            assert "#" in forwarder.endpoint
            await seen.hears(ann)
            await seen.whole(await ann.generate([1], fake_sampling(30), deadline_s=DEADLINE_S))


class Passage(GuardedPublisher):
    """A guarded publisher that is read through a guarded forwarder."""

    def __init__(self, keys: KeyDirectory) -> None:
        super().__init__(keys, ANY)
        self.forward_guard = SocketGuard(keys.server_settings("fwd"))
        doorway = Doorway(self.forward_guard, "stream")
        self.forward = ForwardPort(ANY, doorway, dialer=self.dialer("fwd"))
        self.forward.up.connect(self.pub.endpoint)
        self.read_at = self.forward.endpoint

    def close(self) -> None:
        self.forward.close()
        super().close()
        self.forward_guard.close()


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    keys = KeyDirectory(tmp_path)
    keys.make_unlisted("w0")
    keys.add("fwd", "subscriber")
    keys.add("watcher", "subscriber")
    for name in ("ann", "bob"):
        keys.add(name, "client")
    return keys


@asynccontextmanager
async def passage(keys: KeyDirectory) -> AsyncGenerator[Passage]:
    made = Passage(keys)
    try:
        yield made
    finally:
        made.close()


async def test_a_forwarder_gives_clients_their_own_rows_and_watchers_all(
    keys: KeyDirectory,
) -> None:
    async with passage(keys) as made:
        # Once a client's last subscription is granted, the one before it has been judged.
        rows, everything = made.read("ann", "bob", "ann"), made.read("watcher")
        await made.until(lambda: bool(rows and everything), "bob", "ann")
        last = made.publish("bob", "ann")
        await made.until(lambda: ("ann", last) in rows and ("ann", last) in everything, "ann")
        assert {whose for whose, _ in rows} == {"ann"}
        assert ("bob", last - 1) in everything
        assert made.forward.down.counters.foreign_in >= 1


async def test_a_client_that_asks_a_forwarder_for_digests_gets_nothing(keys: KeyDirectory) -> None:
    async with passage(keys) as made:
        socket = new_socket(zmq.SUB)
        for asked in (b"", topic_of("bob"), claim_of("ann"), topic_of("ann")):
            socket.setsockopt(zmq.SUBSCRIBE, asked)
        socket.connect(made.dialer("ann").dress(socket, made.forward.endpoint))
        topics: set[bytes] = set()

        def has_own() -> bool:
            while socket.poll(0):
                topics.add(socket.recv_multipart()[0])
            return topic_of("ann") in topics

        await made.until(has_own, "bob", "ann")
        n_passed = made.forward.down.counters.frames_out
        await made.until(lambda: made.forward.down.counters.frames_out > n_passed + 5, "bob", "ann")
        has_own()
        socket.close()
        assert topics == {topic_of("ann")}


async def test_a_key_that_is_revoked_reads_no_more_through_a_forwarder(keys: KeyDirectory) -> None:
    async with passage(keys) as made:
        rows, everything = made.read("ann", "ann"), made.read("watcher")
        await made.until(lambda: bool(rows and everything), "ann")
        keys.revoke("ann")
        n_refused = made.forward_guard.n_refused
        await made.until(lambda: made.forward_guard.n_refused > n_refused, "ann")
        last = made.publish("ann")
        await made.until(lambda: ("ann", last) in everything, "ann")
        assert ("ann", last) not in rows


async def test_what_is_no_message_of_a_stream_is_not_passed_on(tmp_path: Path) -> None:
    forward = ForwardPort(f"ipc://{tmp_path}/f")
    source = new_socket(zmq.PUB)
    source.bind(f"ipc://{tmp_path}/p")
    forward.up.connect(f"ipc://{tmp_path}/p")
    heard: list[tuple[bytes, list[Entry]]] = []
    reader = SubPort(lambda topic, entries: heard.append((topic, entries)))
    reader.connect(forward.endpoint)
    topic, batch = topic_of("c"), encode_batch([Entry("idle", "c/1")])
    large = Entry("deltas", "c/2", body=Raw(bytes(100_000)), detached=False)
    announced = encode_batch([Entry("deltas", "c/2", detached=True)])

    def has_come(rid: str) -> bool:
        return any(entry.rid == rid for _, entries in heard for entry in entries)

    async def passes(rid: str) -> None:
        """Send until one has come: in order, so what was sent before the first has come, too."""
        batch = encode_batch([Entry("idle", rid)])
        async with asyncio.timeout(DEADLINE_S):
            while not has_come(rid):
                source.send_multipart([topic, batch])
                await asyncio.sleep(PACE_S)  # nobody tells it who subscribes

    await passes("c/1")
    garbage = [
        [b"tap", batch],
        [topic],
        [topic, b"what is this"],
        [topic, batch, b"x", b"y"],
        [topic, *[b"z"] * 5_000],
    ]
    for frames in garbage:
        source.send_multipart(frames)
    source.send_multipart([topic, announced, bytes(large.body)])
    await passes("c/3")
    assert {each for each, _ in heard} == {topic}
    (kept,) = [entry for _, entries in heard for entry in entries if entry.rid == "c/2"]
    assert bytes(kept.body) == bytes(large.body)
    assert forward.up.counters.malformed_in == len(garbage)
    assert reader.counters.malformed_in == 0
    reader.close()
    forward.close()
    source.close()


async def test_a_forwarder_has_the_key_of_who_may_read_everything(
    keys: KeyDirectory, tmp_path: Path
) -> None:
    def settings(name: str) -> ClientSettings:
        security = keys.client_settings(name, "ab" * 32)
        return ClientSettings(name, f"ipc://{tmp_path}/nobody", security=security)

    for name, why in (("ann", "is a client's"), ("w0", "is not in the allow-list")):
        with pytest.raises(SettingsError, match=why):
            await Forwarder(settings(name), ANY, str(keys.allow_list)).__aenter__()
    with pytest.raises(SettingsError, match="needs both key_file and allow_list"):
        Forwarder(settings("fwd"), ANY)
    alone = ClientSettings("f", f"ipc://{tmp_path}/nobody")
    with pytest.raises(SettingsError, match="is beyond this machine"):
        Forwarder(alone, "tcp://192.0.2.1:7790")


@asynccontextmanager
async def command(*words: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A command under way; gone in the end, whatever happens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def interrupted(process: asyncio.subprocess.Process) -> None:
    """Ctrl-C ends it, and it says nothing."""
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await process.stderr.read() == b""
        assert await process.wait() == 130


async def test_the_commands_forward_and_tail_work_together_and_end_quietly(
    fleet: Fleet, client: RolloutClient
) -> None:
    at = ("--address", fleet.address)
    ends: dict[str, list[int]] = {}

    async def read(lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            event = json.loads(line)
            if event["event"] == "finished":
                ends[event["rid"]] = event["tokens"]

    async with command("forward", "--bind", ANY, *at) as forward:
        endpoints = await serves_at(forward)
        name = client.connection.settings.name
        told = ("--via", endpoints["stream"], "--client", name, "--json")
        async with command("tail", *told, *at) as tail:
            assert tail.stdout is not None
            reading = asyncio.create_task(read(tail.stdout))
            sampled: dict[str, list[int]] = {}
            async with asyncio.timeout(START_S):
                while not ends:
                    rollout = await client.generate([1], fake_sampling(20), deadline_s=DEADLINE_S)
                    sampled[rollout.rid] = rollout.tokens.tolist()
            assert ends == {rid: sampled[rid] for rid in ends}
            await interrupted(tail)
            await reading
        await interrupted(forward)
