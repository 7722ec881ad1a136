"""Pauses, aborts, memory and life cycle of a real engine, commanded by a client."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from bus.codec import pack, unpack_result
from bus.messages.control import Flushed, Memory, MemoryTag, PauseMode, ServerFacts
from bus.messages.endings import Done
from bus.messages.generation import Abort, Aborted, Generated
from rolloutbus import FleetResult, Rollout, RolloutClient, Sampling
from rolloutbus.errors import Refused, RolloutCancelled
from tests.integration.drills import DEADLINE_S, Streamed, status_when, worker_in
from tests.integration.raw_client import RawClient, generate_body

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [3, 10, 20, 7]
N_TOKENS = 800
SAMPLING = Sampling(max_new_tokens=N_TOKENS, temperature=0.9, ignore_eos=True, seed=11)
WORKERS = ["w0", "w1"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model: Path) -> AsyncIterator[rolloutbus.Fleet]:
    options = {"threads": 1, "slots": 16}
    async with rolloutbus.up(
        model=str(tiny_model), workers=2, engine="transformers", engine_options=options, store=False
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: rolloutbus.Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address, name="control") as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(client: RolloutClient) -> list[int]:
    """The tokens that PROMPT and SAMPLING give when nobody interferes."""
    rollout = await client.generate(PROMPT, SAMPLING, deadline_s=DEADLINE_S)
    return rollout.tokens.tolist()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def afterwards_all_serve(client: RolloutClient) -> AsyncIterator[None]:
    """A test that fails half way must not fail those after it."""
    yield
    await client.resume()
    await client.wake_up()


async def under_way(client: RolloutClient) -> Streamed:
    [streamed] = await all_under_way([client])
    return streamed


async def all_under_way(clients: Sequence[RolloutClient]) -> list[Streamed]:
    streams = [Streamed(client, PROMPT, SAMPLING) for client in clients]
    for streamed in streams:
        await streamed.reached(20)
    return streams


def assert_done(result: FleetResult, names: list[str] = WORKERS) -> None:
    assert sorted(result.by_worker) == names
    assert all(isinstance(each, Done) for each in result.by_worker.values())
    assert result.silent == []


async def stands_still(streamed: Streamed) -> bool:
    await streamed.grows()  # what was on its way when the pause took effect
    return not await streamed.grows()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_stream_stands_still_and_goes_on_as_if_nothing_had_been(
    client: RolloutClient, undisturbed: list[int], mode: PauseMode
) -> None:
    streamed = await under_way(client)

    assert_done(await client.pause(mode))
    assert await stands_still(streamed)
    assert len(streamed.tokens) < N_TOKENS
    assert {worker.state for worker in (await client.status()).workers} == {"paused"}
    assert_done(await client.resume())

    rollout = await streamed.rollout()
    assert rollout.tokens.tolist() == streamed.tokens == undisturbed
    assert rollout.n_attempts == 1


async def test_a_pause_that_aborts_costs_a_client_nothing_but_time(
    client: RolloutClient, undisturbed: list[int]
) -> None:
    streamed = await under_way(client)

    assert_done(await client.pause("abort"))
    assert await stands_still(streamed)
    assert_done(await client.resume())

    rollout = await streamed.rollout()
    assert rollout.tokens.tolist() == streamed.tokens == undisturbed
    assert streamed.is_contiguous
    assert 20 <= rollout.n_resumed < N_TOKENS
    assert rollout.n_attempts == 2


async def test_requests_of_one_paused_worker_go_on_at_the_other(
    client: RolloutClient, undisturbed: list[int]
) -> None:
    async with client.session("sticky"):
        first = await client.generate(
            PROMPT, Sampling(max_new_tokens=1), session="sticky", deadline_s=DEADLINE_S
        )
        home = first.worker
        streamed = Streamed(client, PROMPT, SAMPLING, session="sticky")
        await streamed.reached(20)
        assert_done(await client.pause("abort", target=home), [home])
        rollout = await streamed.rollout()
        assert_done(await client.resume(target=home), [home])

    assert rollout.worker != home
    assert rollout.tokens.tolist() == undisturbed


async def test_draining_lets_running_requests_end_and_new_ones_wait(
    client: RolloutClient, undisturbed: list[int]
) -> None:
    running = await under_way(client)

    pause = asyncio.create_task(client.pause("drain"))
    rollout = await running.rollout()
    assert rollout.tokens.tolist() == undisturbed
    assert rollout.n_attempts == 1
    assert_done(await pause)
    waiting = Streamed(client, PROMPT, SAMPLING)
    assert await stands_still(waiting)
    assert waiting.tokens == []
    assert_done(await client.resume())

    assert (await waiting.rollout()).tokens.tolist() == undisturbed


async def test_abort_stops_exactly_the_request_that_it_names(fleet: rolloutbus.Fleet) -> None:
    async with RawClient(fleet.address, "x") as raw:
        rids = ["x/1", "x/10", "x/11", "x/100"]
        for rid in rids:
            raw.generate(rid, generate_body(PROMPT, SAMPLING))
        raw.say("abort", "x/2", pack(Abort(["x/1"])))

        assert unpack_result("abort", await raw.ending("x/2")) == Aborted(1)
        assert (await raw.ending("x/1")).kind == "cancelled"
        for rid in rids[1:]:
            ending = await raw.ending(rid)
            assert ending.kind == "finished"
            generated = unpack_result("generate", ending)
            assert isinstance(generated, Generated)
            assert len(generated.tokens) == 4 * N_TOKENS


async def test_aborting_everything_returns_what_was_sampled_and_spares_other_clients(
    fleet: rolloutbus.Fleet, client: RolloutClient, undisturbed: list[int]
) -> None:
    async with rolloutbus.connect(fleet.address, name="other") as other:
        spared, *streams = await all_under_way([other, *[client] * 4])

        assert await client.abort() == 4

        for streamed in streams:
            with pytest.raises(RolloutCancelled) as caught:
                await streamed.rollout()
            partial = caught.value.partial
            n_tokens = len(partial.tokens)
            assert 20 <= n_tokens < N_TOKENS
            assert len(partial.logprobs) == n_tokens
            assert partial.tokens.tolist() == undisturbed[:n_tokens]
            assert (partial.rid, partial.finish_reason) == (streamed.rid, "abort")
        assert (await spared.rollout()).tokens.tolist() == undisturbed


async def test_aborting_one_rid_leaves_its_siblings_alone(
    client: RolloutClient, undisturbed: list[int]
) -> None:
    streams = await all_under_way([client] * 3)

    assert await client.abort([streams[1].rid, "control/1", "nonsense"]) == 1

    with pytest.raises(RolloutCancelled):
        await streams[1].rollout()
    for streamed in (streams[0], streams[2]):
        assert (await streamed.rollout()).tokens.tolist() == undisturbed


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["weights", "kv_cache"]])
async def test_a_sleeping_fleet_serves_again_after_it_woke_up(
    client: RolloutClient, undisturbed: list[int], tags: list[MemoryTag]
) -> None:
    asleep = await client.sleep(tags)
    for memory in asleep.by_worker.values():
        assert isinstance(memory, Memory)
        assert sorted(memory.asleep) == sorted(tags)
        # On a CPU there is no better place for weights: they stay where they are.
        assert (memory.size_bytes.get("kv_cache", 0) > 0) == ("kv_cache" in tags)
    assert {worker.state for worker in (await client.status()).workers} == {"asleep"}
    waiting = Streamed(client, PROMPT, SAMPLING)
    assert not await waiting.grows()

    woken = await client.wake_up(tags)

    assert sorted(woken.by_worker) == WORKERS
    assert woken.errors == {}
    rollout: Rollout = await waiting.rollout()
    assert rollout.tokens.tolist() == undisturbed


async def test_a_worker_with_running_requests_refuses_to_sleep(
    client: RolloutClient, undisturbed: list[int]
) -> None:
    async with client.session("busy"):
        streamed = Streamed(client, PROMPT, SAMPLING, session="busy")
        await streamed.reached(20)
        status = await client.status()
        [busy] = [worker.name for worker in status.workers if worker.n_running]

        result = await client.sleep(["kv_cache"], target=busy)

        error = result.by_worker[busy]
        assert isinstance(error, Refused)
        assert (error.code, error.outcome) == ("busy", "not_started")
        assert (await streamed.rollout()).tokens.tolist() == undisturbed


async def test_flushing_forgets_cached_prompts_once(client: RolloutClient) -> None:
    prompt = list(range(3, 63))
    rollout = await client.generate(prompt, Sampling(max_new_tokens=4), deadline_s=DEADLINE_S)

    first = (await client.flush_cache(target=rollout.worker)).only(Flushed)
    second = (await client.flush_cache(target=rollout.worker)).only(Flushed)

    assert first.n_tokens >= 48
    assert second.n_tokens == 0


async def test_server_info_and_status_tell_the_same_story(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    status = await status_when(client, lambda status: len(status.workers) == 2)
    info = await client.server_info()

    assert sorted(info.by_worker) == sorted(w.name for w in status.workers) == WORKERS
    for name, facts in info.by_worker.items():
        row = worker_in(status, name)
        assert row is not None
        assert isinstance(facts, ServerFacts)
        assert facts.engine == row.engine == "transformers"
        assert facts.state == row.state == "ready"
        assert facts.version == row.version == 0
        assert facts.slots == row.slots == 16
        assert (facts.vocab_size, facts.max_context) == (64, 1024)
        assert row.pid == fleet.pids[name]
    assert (status.n_queued, status.n_running) == (0, 0)
    one = await client.server_info(target="w1")
    assert list(one.by_worker) == ["w1"]


async def test_a_worker_told_to_leave_finishes_what_it_runs() -> None:
    options = {"step_s": 0.005}
    async with (
        rolloutbus.up(workers=2, engine="fake", engine_options=options, store=False) as fleet,
        rolloutbus.connect(fleet.address, name="leave") as client,
    ):
        assert {worker.state for worker in (await client.status()).workers} == {"ready"}
        # Placement is by chance: enough of them that each worker has some.
        streams = await all_under_way([client] * 40)

        assert_done(await client.shutdown_worker("w0", drain=True), ["w0"])

        rollouts = [await streamed.rollout() for streamed in streams]
        assert {rollout.n_attempts for rollout in rollouts} == {1}
        assert {rollout.worker for rollout in rollouts} == {"w0", "w1"}
        status = await status_when(client, lambda status: worker_in(status, "w0") is None)
        assert [worker.name for worker in status.workers] == ["w1"]
        assert (await client.generate(PROMPT, SAMPLING, deadline_s=DEADLINE_S)).worker == "w1"
