"""A subscriber of a real fleet is told what its workers sampled, whatever is lost on the way."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.transport.ports import SubscriptionPort, TopicBatchHandler
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import LocalProtocolError
from rolloutbus.errors import PeerLost, SettingsError
from rolloutbus.events import (
    Finished,
    GapLost,
    GapRepaired,
    StreamEvent,
    Tokens,
    WorkerJoined,
    WorkerLeft,
)
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.forwarder import Forwarder
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.event_reader import EventReader
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, UNHURRIED, Streamed, fake_sampling
from tests.integration.scripted_fleet import scripted_fleet
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine": "fake",
    "tap": True,
    "store": False,
    "lease": UNHURRIED,
}
N_TOKENS = 40
N_HELD = 60


async def sampled(client: RolloutClient, n: int, n_tokens: int = N_TOKENS) -> list[Rollout]:
    return list(
        await asyncio.gather(
            *(
                client.generate([2, 3 + i], fake_sampling(n_tokens), deadline_s=DEADLINE_S)
                for i in range(n)
            )
        )
    )


def settings_of(fleet: Fleet, name: str) -> ClientSettings:
    return ClientSettings(name=name, router=fleet.address, lease=UNHURRIED, overtime_s=DEADLINE_S)


async def test_everybodys_streams_are_told_as_they_end_for_their_clients(
    fleet: Fleet, client: RolloutClient
) -> None:
    async with RolloutClient(settings_of(fleet, "other")) as other:
        async with EventReader(rolloutbus.subscribe(fleet.address)) as seen:
            await seen.hears(client, n_workers=2)
            await seen.hears(other, n_workers=2)
            for rollout in [*await sampled(client, 10), *await sampled(other, 10)]:
                await seen.whole(rollout)
        assert {event.worker for event in seen.of(WorkerJoined)} == {"w0", "w1"}


async def test_only_the_clients_that_were_named_are_told(
    fleet: Fleet, client: RolloutClient
) -> None:
    async with RolloutClient(settings_of(fleet, "picked")) as picked:
        subscriber = rolloutbus.subscribe(fleet.address, clients=["picked"])
        async with EventReader(subscriber) as seen:
            await seen.hears(picked, n_workers=2)
            await sampled(client, 4)
            for rollout in await sampled(picked, 4):
                await seen.whole(rollout)
        assert {event.rid.partition("/")[0] for event in seen.of(Finished)} == {"picked"}


async def test_who_comes_late_is_told_from_the_first_token(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    with token_limit.at(50):
        streamed = Streamed(client, [3, 10], fake_sampling(100))
        await streamed.reached(50)
        seen = EventReader(rolloutbus.subscribe(fleet.address, rids=[streamed.rid]))
        await seen.__aenter__()
        await seen.until(lambda: len(seen.tokens(streamed.rid)) == 50)
    await seen.whole(await streamed.rollout())
    await seen.__aexit__(None, None, None)
    assert seen.of(GapRepaired)


class Lossy:
    """Real sockets; of what is published, what `drops` says is lost."""

    def __init__(self, security: SecuritySettings | None = None) -> None:
        self._sockets = ports_of(dialer_of(security))
        self.drops: Callable[[Entry], bool] = lambda _: False
        self.ports = Ports(self._sockets.link, self._subscription)

    def _subscription(
        self, on_batch: TopicBatchHandler, clients: Sequence[str]
    ) -> SubscriptionPort:
        def heard(topic: bytes, entries: list[Entry]) -> None:
            on_batch(topic, [entry for entry in entries if not self.drops(entry)])

        return self._sockets.subscription(heard, clients)


async def test_lost_rows_are_repaired_by_the_worker(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    lossy = Lossy()
    subscriber = Subscriber(settings_of(fleet, "lossy"), ports=lossy.ports)
    async with EventReader(subscriber) as seen:
        await seen.hears(client, n_workers=2)
        with token_limit.at(30):
            lossy.drops = lambda entry: entry.kind == "deltas"
            streams = [Streamed(client, [5, i], fake_sampling(60)) for i in range(6)]
            for streamed in streams:
                await streamed.reached(30)
                # A heartbeat tells how far it is.
                await seen.until(lambda s=streamed: len(seen.tokens(s.rid)) == 30)
            lossy.drops = lambda _: False
        for streamed in streams:
            await seen.whole(await streamed.rollout())
        assert len(seen.of(GapRepaired)) >= 6
        assert subscriber.counters.tokens_lost == 0


async def test_a_stream_whose_end_was_lost_ends_with_what_can_be_known(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    lossy = Lossy()
    async with EventReader(Subscriber(settings_of(fleet, "endless"), ports=lossy.ports)) as seen:
        await seen.hears(client, n_workers=2)
        with token_limit.at(20):
            streamed = Streamed(client, [6], fake_sampling(40))
            await seen.until(lambda: len(seen.tokens(streamed.rid)) == 20)
            await streamed.reached(20)  # by its client, who may hear of them later
            others = [Streamed(client, [7], fake_sampling(80))]
            await others[0].reached(20)
            while others[-1].worker != streamed.worker:  # whose heartbeats go on
                others.append(Streamed(client, [7], fake_sampling(80)))
                await others[-1].reached(20)
            lossy.drops = lambda entry: entry.kind == "deltas"
            token_limit.move(40)
            rollout = await streamed.rollout()
            end = await seen.end(streamed.rid)
        assert end.finish_reason is None
        assert end.tokens.tolist() == rollout.tokens[: len(end.tokens)].tolist()
        lossy.drops = lambda _: False
        for other in others:
            await seen.whole(await other.rollout())


async def test_a_session_is_followed_by_the_routers_tap(
    fleet: Fleet, client: RolloutClient
) -> None:
    subscriber = Subscriber(settings_of(fleet, "sessions"), Filter(session=["mine"]))
    async with EventReader(subscriber) as seen:

        async def turn(session: str) -> Rollout:
            return await client.generate(
                [8], fake_sampling(N_TOKENS), session=session, deadline_s=DEADLINE_S
            )

        mine: list[Rollout] = []
        async with asyncio.timeout(DEADLINE_S):
            while not seen.of(Finished):
                mine.append(await turn("mine"))
        for _ in range(2):
            await turn("other")
            mine.append(await turn("mine"))
            await seen.whole(mine[-1])
            assert mine[-1].rid in {event.rid for event in seen.of(Tokens)}
        assert {event.rid for event in seen.of(Finished)} <= {each.rid for each in mine}


async def test_without_a_tap_a_session_cannot_be_followed_and_that_is_said(
    tmp_path: Path,
) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        with pytest.raises(SettingsError, match="tap"):
            await rolloutbus.subscribe(fleet.address, sessions=["mine"]).__aenter__()


async def test_a_rollout_that_outlives_its_worker_is_told_to_its_end(
    tmp_path: Path,
) -> None:
    token_limit = TokenLimit(tmp_path / "hold")
    options: UpOptions = {**FLEET, "engine_options": {"hold_file": str(token_limit.path)}}
    async with (
        rolloutbus.up(**options) as fleet,
        RolloutClient(settings_of(fleet, "c")) as client,
        EventReader(rolloutbus.subscribe(fleet.address)) as seen,
    ):
        await seen.hears(client, n_workers=2)
        with token_limit.at(50):
            streams = [Streamed(client, [4, i], fake_sampling(100)) for i in range(6)]
            for streamed in streams:
                await seen.until(lambda s=streamed: len(seen.tokens(s.rid)) == 50)
                await streamed.reached(50)  # the client hears for itself
            fleet.kill(streams[0].worker)
            await seen.until(lambda: bool(seen.of(WorkerLeft)))
            # An execution that began and ended before the new worker is heard is none of its.
            token_limit.move(60)
            for streamed in streams:
                await seen.until(lambda s=streamed: len(seen.tokens(s.rid)) == 60)
        for streamed in streams:
            await seen.whole(await streamed.rollout())
        assert not seen.of(GapLost)


async def test_it_goes_on_with_the_router_that_comes_after_a_killed_one(tmp_path: Path) -> None:
    token_limit = TokenLimit(tmp_path / "hold")
    options: UpOptions = {**FLEET, "engine_options": {"hold_file": str(token_limit.path)}}
    async with (
        rolloutbus.up(**options) as fleet,
        RolloutClient(settings_of(fleet, "c")) as client,
        EventReader(rolloutbus.subscribe(fleet.address)) as seen,
    ):
        await seen.hears(client, n_workers=2)
        with token_limit.at(50):
            streamed = Streamed(client, [4], fake_sampling(100))
            await seen.until(lambda: len(seen.tokens(streamed.rid)) == 50)
            fleet.kill_router()
        await seen.whole(await streamed.rollout())
        await seen.whole(await client.generate([9], fake_sampling(9), deadline_s=DEADLINE_S))


async def test_with_keys_a_subscriber_repairs_every_stream_and_a_client_sees_its_own(
    tmp_path: Path,
) -> None:
    token_limit = TokenLimit(tmp_path / "hold")
    options: UpOptions = {
        "workers": 1,
        "engine": "fake",
        "store": False,
        "secure": tmp_path / "k",
        "engine_options": {"hold_file": str(token_limit.path)},
    }
    async with rolloutbus.up(**options) as fleet:
        keys = KeyDirectory(tmp_path / "k")
        keys.add("watcher", "subscriber")
        for name in ("ann", "bob"):
            keys.add(name, "client")

        def settings(name: str, key: str = "") -> ClientSettings:
            return ClientSettings(
                name=name,
                router=fleet.address,
                security=keys.client_settings(key or name),
                overtime_s=DEADLINE_S,
                connect_timeout_s=DEADLINE_S,
            )

        lossy = Lossy(keys.client_settings("watcher"))
        own = Subscriber(settings("ann-2", "ann"), Filter(client=["ann", "bob"]))
        async with (
            RolloutClient(settings("ann")) as ann,
            RolloutClient(settings("bob")) as bob,
            EventReader(Subscriber(settings("watcher"), ports=lossy.ports)) as all_seen,
            EventReader(own) as own_seen,
        ):
            await all_seen.hears(ann)
            await own_seen.hears(ann)
            lossy.drops = lambda entry: entry.kind == "deltas"
            with token_limit.at(N_HELD):
                streamed = Streamed(bob, [4], fake_sampling(2 * N_HELD))
                await all_seen.until(lambda: len(all_seen.tokens(streamed.rid)) > 0)
                lossy.drops = lambda _: False
                partial = await streamed.cut()
            end = await all_seen.end(streamed.rid)
            assert end.tokens.tolist() == partial.tokens[: len(end.tokens)].tolist()
            await own_seen.whole(await ann.generate([1], fake_sampling(5), deadline_s=DEADLINE_S))
        assert {event.rid.partition("/")[0] for event in own_seen.of(Finished)} == {"ann"}


async def test_who_is_sent_away_for_good_is_told_so(tmp_path: Path) -> None:
    async with (
        scripted_fleet(tmp_path) as fleet,
        rolloutbus.subscribe(fleet.address) as subscriber,
        Forwarder(ClientSettings("f", fleet.address), f"ipc://{tmp_path}/f") as forwarder,
    ):
        assert isinstance(await anext(subscriber), WorkerJoined)
        fleet.dismiss("unknown-peer")  # say hello again, that is
        fleet.dismiss("forbidden")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PeerLost, match="not you"):
                await anext(subscriber)
            with pytest.raises(PeerLost, match="not you"):
                await forwarder.stopped()


async def test_it_opens_and_closes_without_a_block(fleet: Fleet) -> None:
    subscriber = await rolloutbus.subscribe(fleet.address).open()
    with pytest.raises(LocalProtocolError, match="opened already"):
        await subscriber.open()
    await subscriber.close()
    await subscriber.close()
    assert [event async for event in subscriber if isinstance(event, Finished)] == []


async def test_the_iterator_ends_with_its_context(fleet: Fleet) -> None:
    told: list[StreamEvent] = []
    subscriber = rolloutbus.subscribe(fleet.address)
    async with subscriber:

        async def read() -> None:
            told.extend([event async for event in subscriber])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)  # it begins
    async with asyncio.timeout(DEADLINE_S):
        await reader
