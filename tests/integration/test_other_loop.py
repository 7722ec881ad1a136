"""What is opened on one event loop refuses to be used on another, and goes on serving its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rolloutbus import RolloutClient, WeightPublisher, connect, record, subscribe
from rolloutbus.bus.wire.messages.generation import OpenSession, SamplingParams
from rolloutbus.errors import WrongEventLoop
from rolloutbus.types import Session
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.test_client_shell import PretendFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

FEW = SamplingParams(max_new_tokens=3)
WEIGHTS = {"w": torch.ones(2)}
Use = Callable[[RolloutClient], Awaitable[Any]]


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PretendFleet]:
    fleet = PretendFleet(tmp_path)
    yield fleet
    fleet.close()


@pytest_asyncio.fixture
async def client(fleet: PretendFleet) -> AsyncIterator[RolloutClient]:
    async with connect(fleet.address, name="home") as client:
        yield client


async def elsewhere(work: Callable[[], Awaitable[object]]) -> None:
    """On a loop of its own, in a thread; refused there."""

    async def refused() -> str:
        with pytest.raises(WrongEventLoop) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await work()
        assert caught.value.outcome == "not_started"
        return str(caught.value)

    said = await asyncio.to_thread(asyncio.run, refused())
    assert "from another event loop" in said
    assert "run_coroutine_threadsafe" in said


async def _in_block(session: Session) -> None:
    async with session:
        pass


async def _read(client: RolloutClient) -> None:
    async for _ in client.stream([5], FEW):
        pass


async def _begin(client: RolloutClient) -> None:
    async with WeightPublisher(client).begin():
        pass


USES: dict[str, Use] = {
    "generate": lambda client: client.generate([5], FEW),
    "generate_batch": lambda client: client.generate_batch([[5], [6]], FEW, n=2),
    "stream": _read,
    "session": lambda client: _in_block(client.session("one")),
    "collect": lambda client: client.collect("home/1"),
    "reattach": lambda client: client.reattach(),
    "score": lambda client: client.score([1], [[2]], [3]),
    "pause": lambda client: client.pause(),
    "status": lambda client: client.status(),
    "abort": lambda client: client.abort(),
    "open": lambda client: client.__aenter__(),
    "close": lambda client: client.__aexit__(),
    "publish": lambda client: WeightPublisher(client).publish(WEIGHTS),
    "restore": lambda client: WeightPublisher(client).restore(3),
    "begin": _begin,
    "publish_lora": lambda client: WeightPublisher(client).publish_lora(
        "a", {"m.lora_A.weight": torch.ones(1, 2), "m.lora_B.weight": torch.ones(2, 1)}, alpha=1.0
    ),
}


@pytest.mark.parametrize("use", USES)
async def test_client_is_refused_on_another_loop_and_serves_its_own(
    client: RolloutClient, use: str
) -> None:
    await elsewhere(lambda: USES[use](client))
    assert (await client.generate([5], FEW)).tokens.tolist() == [5, 6, 7]


async def test_publisher_and_session_made_at_home_are_refused_elsewhere(
    client: RolloutClient,
) -> None:
    publisher = WeightPublisher(client)
    await elsewhere(lambda: publisher.publish(WEIGHTS))
    async with client.session("one") as session:
        await elsewhere(lambda: session.generate([5], FEW))
        await elsewhere(session.renew)
        assert (await session.generate([5], FEW)).tokens.tolist() == [5, 6, 7]


async def test_stream_cannot_be_read_on_elsewhere_and_ends_at_home(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    stream = client.stream([13], SamplingParams())
    rid = (await anext(stream)).rid
    await elsewhere(lambda: anext(stream))
    async with asyncio.timeout(DEADLINE_S):
        await fleet.something_aborted.wait()
    assert fleet.aborted == {rid}
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_subscribers_and_recorder_are_refused_elsewhere(
    fleet: PretendFleet, client: RolloutClient, tmp_path: Path
) -> None:
    async with (
        subscribe(fleet.address) as events,
        record(fleet.address, tmp_path / "journal") as recorder,
    ):
        await elsewhere(lambda: anext(events))
        await elsewhere(events.__aexit__)
        await elsewhere(recorder.stopped)
        await elsewhere(lambda: recorder.caught_up(1.0))
        reading = asyncio.ensure_future(anext(events))
        async with asyncio.timeout(DEADLINE_S):
            while not reading.done():  # a subscription is no event for its publisher
                await client.generate([5], FEW)


async def test_thread_without_a_loop_is_refused_too(client: RolloutClient) -> None:
    session = Session(client.connection, OpenSession("one"))
    with pytest.raises(WrongEventLoop, match="outside of any event loop"):
        await asyncio.to_thread(session.close)
    with pytest.raises(WrongEventLoop, match="connect_sync"):
        await asyncio.to_thread(client.connection.close)
