"""Commands at a moment when SGLang's scheduler would end over them: refused, or done otherwise."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.errors import RequestError
from rolloutbus.bus.wire.messages.control import Memory, MemoryTag, PauseMode
from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.errors import BusError, FleetCommandFailed
from tests.integration.live_fleet import DEADLINE_S, Streamed
from tests.integration.reference import Reference
from tests.sglang.models import ENDLESS
from tests.sglang.processes import scheduler_pids

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
N_STREAMS, N_BEFORE = 4, 10
HELD: list[PauseMode] = ["in_place", "retract"]
"""Pauses that keep requests."""


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def the_engine_lives_on(fleet: Fleet, client: RolloutClient) -> AsyncIterator[None]:
    """After each test: the same scheduler as before it, and it works."""
    before = scheduler_pids(fleet)
    assert before
    yield
    await client.abort()
    await client.wake_up(check=False)
    await client.resume(check=False)
    rollout = await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert len(rollout.tokens) == GREEDY.max_new_tokens
    assert scheduler_pids(fleet) == before


async def under_way(client: RolloutClient) -> list[Streamed]:
    streams = [Streamed(client, PROMPT, LONG) for _ in range(N_STREAMS)]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    return streams


async def all_go_on(streams: list[Streamed]) -> None:
    for streamed in streams:
        await streamed.grown_by(N_BEFORE)
        assert streamed.is_contiguous


@pytest.mark.shows("calls at the wrong moment")
async def test_memory_is_not_released_beside_running_requests(client: RolloutClient) -> None:
    streams = await under_way(client)

    told = (await client.sleep(["kv_cache"], check=False)).by_worker["w0"]

    assert isinstance(told, RequestError)
    assert told.code == "busy"
    await all_go_on(streams)


@pytest.mark.parametrize("mode", HELD)
async def test_memory_is_not_released_beside_requests_that_a_pause_holds(
    client: RolloutClient, mode: PauseMode
) -> None:
    streams = await under_way(client)
    await client.pause(mode)

    told = (await client.sleep(["kv_cache"], check=False)).by_worker["w0"]

    assert isinstance(told, RequestError)
    assert told.code == "busy"
    await client.resume()
    await all_go_on(streams)


async def test_memory_that_was_never_released_can_be_taken_back(client: RolloutClient) -> None:
    subsets: list[list[MemoryTag]] = [["kv_cache"], ["weights", "kv_cache"], ["cuda_graph"]]
    for tags in subsets:
        woken = (await client.wake_up(tags)).only(Memory)
        assert woken.asleep == []


async def test_memory_is_released_once_and_taken_back_once(client: RolloutClient) -> None:
    for _ in range(2):
        assert (await client.sleep(["kv_cache"])).only(Memory).asleep == ["kv_cache"]
    waiting = Streamed(client, PROMPT, GREEDY)
    assert await waiting.stands_still()
    for _ in range(2):
        assert (await client.wake_up(["weights", "kv_cache"])).only(Memory).asleep == []
    assert len((await waiting.rollout()).tokens) == GREEDY.max_new_tokens


@pytest.mark.parametrize("mode", HELD)
async def test_a_flush_beside_requests_that_a_pause_holds_harms_nobody(
    client: RolloutClient, mode: PauseMode
) -> None:
    streams = await under_way(client)
    await client.pause(mode)

    with pytest.raises(FleetCommandFailed, match="busy"):
        await client.flush_cache()

    await client.resume()
    await all_go_on(streams)


@pytest.mark.parametrize("mode", [*HELD, "abort"])
@pytest.mark.parametrize("in_flight", ["keep", "retract", "abort"])
async def test_weights_are_replaced_under_every_pause(
    client: RolloutClient, llama: Path, mode: PauseMode, in_flight: InFlight
) -> None:
    streams = await under_way(client)
    await client.pause(mode)

    published = await WeightPublisher(client).publish(
        Reference(llama).model.named_parameters(), in_flight=in_flight, deadline_s=DEADLINE_S
    )

    assert published.quarantined == {}
    await client.resume()
    await all_go_on(streams)


async def test_weights_of_another_shape_are_refused(client: RolloutClient, llama: Path) -> None:
    weights = Reference(llama).model.state_dict()
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]

    with pytest.raises(BusError, match=r"model\.norm\.weight"):
        await WeightPublisher(client).publish(weights, require="all", deadline_s=DEADLINE_S)


@pytest.mark.shows("validate_weights")
async def test_weights_that_are_not_numbers_are_refused(client: RolloutClient, llama: Path) -> None:
    weights = Reference(llama).model.state_dict()
    weights["model.norm.weight"][0] = math.nan

    with pytest.raises(BusError, match=r"model\.norm\.weight"):
        await WeightPublisher(client).publish(weights, require="all", deadline_s=DEADLINE_S)
