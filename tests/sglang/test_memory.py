"""Memory that the real SGLang gives up and takes back; here a stand-in really spoils it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams, WeightPublisher, types
from rolloutbus.bus.wire.messages.control import Flushed, Memory, MemoryTag
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.errors import FleetCommandFailed, RequestError, RolloutCancelled
from tests.integration.live_fleet import DEADLINE_S, Streamed, facts_when
from tests.integration.reference import Reference
from tests.sglang.models import ENDLESS
from tests.sglang.processes import scheduler_pids

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
ALL: list[MemoryTag] = ["weights", "kv_cache", "cuda_graph"]
TOLERANCE = 1e-4


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_died(fleet: Fleet, client: RolloutClient) -> AsyncIterator[None]:
    """After each test: the same scheduler as before it, awake."""
    before = scheduler_pids(fleet)
    yield
    await client.wake_up(ALL, check=False)
    await client.resume(check=False)
    await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert scheduler_pids(fleet) == before


async def greedy(client: RolloutClient) -> Rollout:
    return await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)


async def refused(client: RolloutClient, tags: list[MemoryTag]) -> RequestError:
    told = (await client.sleep(tags, check=False)).by_worker["w0"]
    assert isinstance(told, RequestError)
    return told


async def asleep_now(client: RolloutClient) -> list[str]:
    facts = await facts_when(client, lambda found: "w0" in found)
    return facts["w0"].asleep


@pytest.mark.shows("sleep", "enable_weights_cpu_backup")
@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["cuda_graph"], ALL])
async def test_an_engine_with_a_copy_samples_the_same_after_its_sleep(
    client: RolloutClient, tags: list[MemoryTag]
) -> None:
    before = await greedy(client)

    asleep = (await client.sleep(tags)).only(Memory)
    assert sorted(asleep.asleep) == sorted(tags) == sorted(await asleep_now(client))
    assert sorted(asleep.size_bytes) == sorted(tags)
    awake = (await client.wake_up(tags)).only(Memory)

    assert awake.asleep == []
    after = await greedy(client)
    assert after.tokens.tolist() == before.tokens.tolist()
    assert np.abs(after.logprobs - before.logprobs).max() < TOLERANCE


@pytest.mark.shows("sleep_all", "wake_up_all", "sleep.tags", "MemoryTag", "MemoryTag.ALL")
@pytest.mark.parametrize("tags", [None, types.MemoryTag.ALL], ids=["none", "all"])
async def test_no_tags_are_all_of_them(client: RolloutClient, tags: list[MemoryTag] | None) -> None:
    before = await greedy(client)

    assert sorted((await client.sleep(tags)).only(Memory).asleep) == sorted(ALL)
    assert (await client.wake_up(tags)).only(Memory).asleep == []

    assert (await greedy(client)).tokens.tolist() == before.tokens.tolist()


@pytest.mark.shows("sleep_weights_only", "wake_up_weights_only", "MemoryTag.TRAINING_DEFAULT")
async def test_while_a_trainer_trains_the_weights_alone_can_sleep(client: RolloutClient) -> None:
    before = await greedy(client)
    tags = types.MemoryTag.TRAINING_DEFAULT

    assert (await client.sleep(tags)).only(Memory).asleep == [types.MemoryTag.WEIGHTS]
    assert (await client.wake_up(tags)).only(Memory).asleep == []

    assert (await greedy(client)).tokens.tolist() == before.tokens.tolist()


@pytest.mark.shows("sleep.abort_first")
async def test_a_busy_engine_is_stopped_first_and_its_requests_go_on_when_it_wakes(
    client: RolloutClient,
) -> None:
    streamed = Streamed(client, PROMPT, LONG)
    await streamed.reached(10)

    asleep = (await client.sleep(abort_first=True, deadline_s=DEADLINE_S)).only(Memory)

    assert sorted(asleep.asleep) == sorted(ALL)
    assert await streamed.stands_still()
    await client.wake_up()
    await streamed.grown_by(10)
    assert streamed.is_contiguous
    assert (await streamed.cut()).n_attempts == 2


@pytest.mark.shows("sleep.drain_timeout", "sleep.timeout")
async def test_a_busy_engine_is_drained_or_stays_awake_at_the_deadline(
    client: RolloutClient,
) -> None:
    endless = Streamed(client, PROMPT, LONG)
    await endless.reached(10)
    async with asyncio.timeout(DEADLINE_S):
        # A busy machine may need longer than the last second that a worker has to answer.
        while not (told := await client.sleep(drain=True, deadline_s=1.0, check=False)).errors:
            assert told.silent == ["w0"]
    with pytest.raises(FleetCommandFailed, match="busy"):
        told.check()
    await endless.grown_by(10)
    await endless.cut()

    some = SamplingParams(max_new_tokens=400, ignore_eos=True)
    running = Streamed(client, PROMPT, some)
    await running.reached(10)
    asleep = (await client.sleep(drain=True, deadline_s=DEADLINE_S)).only(Memory)

    assert sorted(asleep.asleep) == sorted(ALL)
    assert len((await running.rollout()).tokens) == some.max_new_tokens


@pytest.mark.shows("wake_up", "wake_up.tags", "wake_up.timeout", "MemoryTag.KV_CACHE")
async def test_requests_wait_until_the_last_tag_is_back(client: RolloutClient) -> None:
    await client.sleep(ALL)
    waiting = Streamed(client, PROMPT, GREEDY)
    for tag in ALL:
        assert await waiting.stands_still()
        assert waiting.tokens == []
        await client.wake_up([tag])
    assert len((await waiting.rollout()).tokens) == GREEDY.max_new_tokens


async def test_a_resume_does_not_wake_an_engine(client: RolloutClient) -> None:
    await client.pause("abort")
    await client.sleep(["kv_cache"])

    assert (await client.resume()).only(Done) == Done()

    waiting = Streamed(client, PROMPT, GREEDY)
    assert await waiting.stands_still()
    await client.wake_up(["kv_cache"])
    assert len((await waiting.rollout()).tokens) == GREEDY.max_new_tokens


async def test_waking_up_does_not_end_a_pause(client: RolloutClient) -> None:
    await client.pause("abort")
    await client.sleep(["kv_cache"])

    await client.wake_up(["kv_cache"])

    waiting = Streamed(client, PROMPT, GREEDY)
    assert await waiting.stands_still()
    await client.resume()
    assert len((await waiting.rollout()).tokens) == GREEDY.max_new_tokens


async def test_a_sleeping_cache_holds_nothing_to_be_flushed(client: RolloutClient) -> None:
    await greedy(client)
    await client.sleep(["kv_cache"])

    assert (await client.flush_cache()).only(Flushed).n_tokens == 0


async def test_an_engine_that_pauses_in_place_with_nothing_to_do_can_sleep(
    client: RolloutClient,
) -> None:
    for mode in ("in_place", "retract"):
        await greedy(client)
        await client.pause(mode)
        assert (await client.sleep(["kv_cache"])).only(Memory).asleep == ["kv_cache"]
        await client.wake_up(["kv_cache"])
        await client.resume()


async def test_requests_that_are_aborted_as_they_come_keep_no_engine_awake(
    client: RolloutClient,
) -> None:
    for _ in range(20):
        streamed = Streamed(client, PROMPT, LONG)
        await client.abort([streamed.rid])
        with pytest.raises(RolloutCancelled):
            await streamed.rollout()

    async with asyncio.timeout(DEADLINE_S):
        # The last of them may leave the engine a moment after its client was told.
        while (told := await client.sleep(["kv_cache"], check=False)).errors:
            assert "busy" in str(told.errors["w0"])
    assert told.only(Memory).asleep == ["kv_cache"]


@pytest.mark.shows("MemoryTag.WEIGHTS", "colocated cycle")
async def test_woken_weights_without_a_copy_serve_nobody_until_they_are_replaced(
    operated: RolloutClient, llama: Path
) -> None:
    reference = Reference(llama)
    publisher = WeightPublisher(operated)
    first = await publisher.publish(reference.model.named_parameters(), require="all")
    reference.keep(first.version)
    for seed in (1, 2):
        await operated.sleep(["weights", "kv_cache"])
        waiting = Streamed(operated, PROMPT, GREEDY)

        await operated.wake_up(["weights"])

        assert await waiting.stands_still()
        reference.perturb(seed=seed)
        published = await publisher.publish(reference.model.named_parameters(), require="all")
        reference.keep(published.version)
        assert published.quarantined == {}
        assert await waiting.stands_still()
        await operated.wake_up(["kv_cache"])
        rollout = await waiting.rollout()
        assert {int(version) for version in rollout.token_versions} == {published.version}
        assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)
        truth = reference.fresh(PROMPT, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


async def test_a_torn_engine_is_brought_to_the_last_version_by_itself(
    operated: RolloutClient, llama: Path
) -> None:
    reference = Reference(llama)
    published = await WeightPublisher(operated).publish(
        reference.model.named_parameters(), require="all"
    )
    reference.keep(published.version)
    await operated.sleep(["weights", "kv_cache"])

    await operated.wake_up(["weights", "kv_cache"])

    rollout = await operated.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert {int(version) for version in rollout.token_versions} == {published.version}
    assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)


async def test_weights_that_sleep_are_not_replaced(operated: RolloutClient, llama: Path) -> None:
    weights = dict(Reference(llama).model.named_parameters())
    published = await WeightPublisher(operated).publish(weights, require="all")
    await operated.sleep(["weights"])

    with pytest.raises(RequestError):
        await WeightPublisher(operated).publish(weights, require="all", deadline_s=DEADLINE_S)

    await operated.wake_up(["weights"])
    rollout = await operated.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert min(rollout.token_versions) >= published.version
