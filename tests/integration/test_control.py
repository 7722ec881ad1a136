"""Pauses, aborts, memory and life cycle of a real engine, commanded by a client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.control import Flushed, Memory, MemoryTag, PauseMode, ServerFacts
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.errors import FleetCommandFailed, Refused
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetResult, FleetStatus
from tests.integration.conftest import MAX_CONTEXT, REAL_ENGINES, SLOTS, VOCAB_SIZE
from tests.integration.control_steps import (
    N_BEFORE,
    N_TOKENS,
    PROMPT,
    abort_stops_exactly_the_request_that_it_names,
    all_under_way,
)
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    PATIENT,
    Streamed,
    status_when,
    worker_in,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "store": False, "lease": PATIENT}
WORKERS = ["w0", "w1"]
LONG_S = 3 * DEADLINE_S
"""Of commands that wait for what runs, which a test lets go on for a while."""


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def afterwards_all_serve(client: RolloutClient) -> AsyncIterator[None]:
    """A test that fails half way must not fail those after it."""
    yield
    await client.abort()
    await client.resume(check=False)
    await client.wake_up(check=False)


def sampling(n_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=n_tokens, temperature=0.9, ignore_eos=True, sampling_seed=11
    )


async def under_way(client: RolloutClient, n_tokens: int = ENDLESS) -> Streamed:
    [streamed] = await all_under_way([client], sampling(n_tokens))
    return streamed


async def assert_undisturbed(client: RolloutClient, rollout: Rollout) -> None:
    """Its tokens are those that the same request gets when nobody interferes."""
    alone = await client.generate(PROMPT, sampling(len(rollout.tokens)), deadline_s=DEADLINE_S)
    assert rollout.tokens.tolist() == alone.tokens.tolist()


async def one_is(client: RolloutClient, worker: str, state: str) -> None:
    """Wait until a worker's heartbeat says so."""

    def is_so(status: FleetStatus) -> bool:
        row = worker_in(status, worker)
        return row is not None and row.state == state

    await status_when(client, is_so)


async def all_are(client: RolloutClient, state: str) -> None:
    for worker in WORKERS:
        await one_is(client, worker, state)


async def goes_on(client: RolloutClient, streamed: Streamed) -> Rollout:
    """See it grow again, without a seam; what it came to."""
    await streamed.grown_by(N_BEFORE)
    assert streamed.is_contiguous
    rollout = await streamed.cut()
    await assert_undisturbed(client, rollout)
    return rollout


def assert_done(result: FleetResult, names: list[str] = WORKERS) -> None:
    assert sorted(result.by_worker) == names
    assert all(isinstance(each, Done) for each in result.by_worker.values())
    assert result.silent == []


@pytest.mark.shows("pause_generation")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_stream_stands_still_and_goes_on_as_if_nothing_had_been(
    client: RolloutClient, mode: PauseMode
) -> None:
    streamed = await under_way(client)

    assert_done(await client.pause(mode))
    assert await streamed.stands_still()
    await all_are(client, "paused")
    assert_done(await client.resume())

    rollout = await goes_on(client, streamed)
    assert rollout.n_attempts == 1


async def test_a_pause_that_aborts_costs_a_client_nothing_but_time(client: RolloutClient) -> None:
    streamed = await under_way(client)

    assert_done(await client.pause("abort"))
    assert await streamed.stands_still()
    n_tokens = len(streamed.tokens)
    assert_done(await client.resume())

    rollout = await goes_on(client, streamed)
    assert rollout.n_resumed >= n_tokens
    assert rollout.n_attempts == 2


async def test_requests_of_one_paused_worker_go_on_at_the_other(client: RolloutClient) -> None:
    streamed = await under_way(client)
    home = streamed.worker

    assert_done(await client.pause("abort", target=home), [home])
    await streamed.seen(lambda: streamed.worker != home)

    await goes_on(client, streamed)
    assert_done(await client.resume(target=home), [home])


async def test_draining_lets_running_requests_end_and_new_ones_wait(
    client: RolloutClient,
) -> None:
    running = await under_way(client, N_TOKENS)

    pause = asyncio.create_task(client.pause("drain", deadline_s=LONG_S))
    rollout = await running.rollout()
    assert rollout.n_attempts == 1
    assert_done(await pause)
    waiting = Streamed(client, PROMPT, sampling(N_TOKENS))
    assert await waiting.stands_still()
    assert waiting.tokens == []
    assert_done(await client.resume())

    assert (await waiting.rollout()).tokens.tolist() == rollout.tokens.tolist()
    await assert_undisturbed(client, rollout)


async def test_a_drain_waits_for_what_runs(client: RolloutClient) -> None:
    running = await under_way(client)

    pause = asyncio.create_task(client.pause("drain", deadline_s=LONG_S))
    await all_are(client, "paused")
    waiting = Streamed(client, PROMPT, sampling(N_TOKENS))
    await status_when(client, lambda status: status.n_queued == 1)
    await running.grown_by(N_BEFORE)
    assert not pause.done()
    await running.cut()

    assert_done(await pause)
    assert_done(await client.resume())
    await waiting.rollout()


async def test_abort_stops_exactly_the_request_that_it_names(fleet: rolloutbus.Fleet) -> None:
    await abort_stops_exactly_the_request_that_it_names(fleet.address, sampling)


async def test_aborting_everything_returns_what_was_sampled_and_spares_other_clients(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    async with rolloutbus.connect(fleet.address, name="other") as other:
        spared, *streams = await all_under_way([other, *[client] * 4], sampling(ENDLESS))

        assert await client.abort() == 4

        for streamed in streams:
            partial = await streamed.cancelled()
            n_tokens = len(partial.tokens)
            assert N_BEFORE <= n_tokens < ENDLESS
            assert len(partial.logprobs) == n_tokens
            await assert_undisturbed(client, partial)
        await goes_on(client, spared)


@pytest.mark.shows("request_ids")
async def test_aborting_one_rid_leaves_its_siblings_alone(client: RolloutClient) -> None:
    streams = await all_under_way([client] * 3, sampling(ENDLESS))

    with pytest.raises(Refused, match=r"unknown_request: 2 of 3 .*'nonsense'"):
        await client.abort([streams[1].rid, "control/1", "nonsense"])

    await streams[1].cancelled()
    for streamed in (streams[0], streams[2]):
        await goes_on(client, streamed)


@pytest.mark.shows("sleep")
@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["weights", "kv_cache"]])
async def test_a_sleeping_fleet_serves_again_after_it_woke_up(
    client: RolloutClient, tags: list[MemoryTag]
) -> None:
    asleep = await client.sleep(tags)
    for memory in asleep.by_worker.values():
        assert isinstance(memory, Memory)
        assert sorted(memory.asleep) == sorted(tags)
        # On a CPU there is no better place for weights: they stay where they are.
        assert (memory.size_bytes.get("kv_cache", 0) > 0) == ("kv_cache" in tags)
    await all_are(client, "asleep")
    waiting = Streamed(client, PROMPT, sampling(N_TOKENS))
    assert await waiting.stands_still()
    assert waiting.tokens == []

    woken = await client.wake_up(tags)

    assert sorted(woken.by_worker) == WORKERS
    assert woken.errors == {}
    await assert_undisturbed(client, await waiting.rollout())


async def test_a_worker_with_running_requests_refuses_to_sleep(client: RolloutClient) -> None:
    streamed = await under_way(client)
    busy = streamed.worker

    with pytest.raises(FleetCommandFailed, match=f"1 of 1 .* {busy}: Refused: busy: .*") as caught:
        await client.sleep(["kv_cache"], target=busy)

    assert caught.value.outcome == "not_started"
    told = await client.sleep(["kv_cache"], target=busy, check=False)
    for result in (caught.value.result, told):
        error = result.by_worker[busy]
        assert isinstance(error, Refused)
        assert (error.code, error.outcome) == ("busy", "not_started")
    await goes_on(client, streamed)


@pytest.mark.shows("sleep.tags", "sleep.abort_first")
async def test_a_busy_worker_is_stopped_first_and_its_requests_go_on_when_it_wakes(
    client: RolloutClient,
) -> None:
    streamed = await under_way(client)

    asleep = await client.sleep(abort_first=True)

    for memory in asleep.by_worker.values():
        assert isinstance(memory, Memory)
        assert memory.asleep == ["cuda_graph", "kv_cache", "weights"]
        assert memory.size_bytes["cuda_graph"] == 0
    await all_are(client, "asleep")
    assert await streamed.stands_still()
    n_tokens = len(streamed.tokens)
    assert (await client.wake_up()).errors == {}
    rollout = await goes_on(client, streamed)
    assert rollout.n_resumed >= n_tokens


@pytest.mark.shows("sleep.drain_timeout")
async def test_a_busy_worker_is_drained_before_it_sleeps(client: RolloutClient) -> None:
    running = Streamed(client, PROMPT, sampling(N_TOKENS))
    await running.reached(N_BEFORE)

    asleep = await client.sleep(["kv_cache"], drain=True, deadline_s=DEADLINE_S)

    assert asleep.errors == {}
    rollout = await running.rollout()
    assert (rollout.n_attempts, len(rollout.tokens)) == (1, N_TOKENS)
    await client.wake_up(["kv_cache"])
    await assert_undisturbed(client, rollout)


@pytest.mark.shows("sleep.timeout")
async def test_a_worker_that_cannot_be_drained_in_time_stays_awake_and_says_so(
    client: RolloutClient,
) -> None:
    streamed = await under_way(client)

    said = ""
    async with asyncio.timeout(DEADLINE_S):
        while "Refused" not in said:  # a worker that does not answer in time says nothing
            with pytest.raises(FleetCommandFailed) as caught:
                await client.sleep(drain=True, target=streamed.worker, deadline_s=1.0)
            said = str(caught.value)

    why = "busy: what runs there had not ended after 1 s: 1 requests run; give it a longer"
    assert f"{streamed.worker}: Refused: {why} deadline_s" in said
    await goes_on(client, streamed)


async def test_a_sleep_that_is_given_up_while_a_worker_drains_leaves_it_awake(
    client: RolloutClient,
) -> None:
    streamed = await under_way(client)
    busy = streamed.worker

    sleeping = asyncio.create_task(client.sleep(drain=True, target=busy, deadline_s=LONG_S))
    await one_is(client, busy, "paused")
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping

    await one_is(client, busy, "ready")
    await goes_on(client, streamed)


async def test_a_fleet_that_was_paused_stays_so_when_it_slept(client: RolloutClient) -> None:
    await client.pause()
    await all_are(client, "paused")
    await client.sleep(["kv_cache"], abort_first=True)
    await client.wake_up()
    await all_are(client, "paused")


async def test_a_fleet_that_was_paused_stays_so_when_it_slept_twice(client: RolloutClient) -> None:
    await client.pause("retract")
    await all_are(client, "paused")
    await client.sleep(["kv_cache"], abort_first=True)
    await client.sleep(["weights"], abort_first=True)
    await client.wake_up()
    await all_are(client, "paused")
    assert (await client.status()).pause == "retract"


async def test_a_worker_that_joins_serves_after_a_fleet_slept_of_which_one_was_paused(
    client: RolloutClient, fleet: Fleet
) -> None:
    await client.pause(target="w1")
    await one_is(client, "w1", "paused")
    await client.sleep(abort_first=True)
    await client.wake_up()

    status = await client.status()
    assert (status.pause, status.paused) == ("", {"w1": "in_place"})
    await one_is(client, "w0", "ready")
    await one_is(client, "w1", "paused")
    name = await fleet.add_worker()
    try:
        await one_is(client, name, "ready")
        await client.pause(target="w0")
        few = SamplingParams(max_new_tokens=4)
        assert (await client.generate(PROMPT, few, deadline_s=DEADLINE_S)).worker == name
    finally:
        await fleet.remove_worker(name)


@pytest.mark.parametrize(
    ("options", "field"), [({"tags": []}, "tags"), ({"abort_first": True, "drain": True}, "drain")]
)
async def test_a_sleep_that_says_nothing_or_two_things_is_refused(
    client: RolloutClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        await client.sleep(**options)
    assert caught.value.field == field


@pytest.mark.shows("abort_generation")
async def test_a_trainer_stops_what_all_clients_sample_and_each_has_its_partial(
    client: RolloutClient, fleet: Fleet
) -> None:
    async with rolloutbus.connect(fleet.address, name="other") as other:
        streams = await all_under_way([client, other], sampling(ENDLESS))
        waiting = Streamed(other, PROMPT, sampling(N_TOKENS), versions="min:99")
        await status_when(client, lambda status: status.n_queued == 1)

        assert await client.abort_policy() == 3

        for streamed in streams:
            assert len((await streamed.cancelled()).tokens) >= N_BEFORE
        assert len((await waiting.cancelled()).tokens) == 0
    with pytest.raises(Refused) as caught:
        await client.abort_policy("defalt")
    assert caught.value.code == "unknown_policy"


@pytest.mark.shows("reset_prefix_cache")
async def test_flushing_forgets_cached_prompts_once(client: RolloutClient) -> None:
    prompt = list(range(3, 63))
    rollout = await client.generate(prompt, SamplingParams(max_new_tokens=4), deadline_s=DEADLINE_S)

    first = (await client.flush_cache(target=rollout.worker)).only(Flushed)
    second = (await client.flush_cache(target=rollout.worker)).only(Flushed)

    assert first.n_tokens >= 48
    assert second.n_tokens == 0


@pytest.mark.shows("reset_running_requests")
async def test_prefixes_are_reset_also_while_requests_run_which_go_on(
    client: RolloutClient,
) -> None:
    streamed = await under_way(client)
    [other] = {*WORKERS} - {streamed.worker}
    await client.pause(target=other)

    result = await client.reset_prefix_cache(reset_running_requests=True)

    assert sorted(result.by_worker) == WORKERS
    assert result.errors == {}
    await one_is(client, other, "paused")  # as it was before
    rollout = await goes_on(client, streamed)
    assert rollout.n_attempts == 2


@pytest.mark.shows("get_server_info")
async def test_server_info_and_status_tell_the_same_story(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    await all_are(client, "ready")
    status = await status_when(client, lambda status: not status.n_running)
    info = await client.server_info()

    assert sorted(info.by_worker) == sorted(w.name for w in status.workers) == WORKERS
    for name, facts in info.by_worker.items():
        row = worker_in(status, name)
        assert row is not None
        assert isinstance(facts, ServerFacts)
        assert facts.engine == row.engine == "transformers"
        assert facts.state == row.state == "ready"
        assert facts.version == row.version == 0
        assert facts.slots == row.slots == SLOTS
        assert (facts.vocab_size, facts.max_context) == (VOCAB_SIZE, MAX_CONTEXT)
        assert row.pid == fleet.pids[name]
    assert (status.n_queued, status.n_running) == (0, 0)
    one = await client.server_info(target="w1")
    assert list(one.by_worker) == ["w1"]


async def test_a_worker_told_to_leave_finishes_what_it_runs(token_limit: TokenLimit) -> None:
    options = {"step_s": 0.005, "hold_file": str(token_limit.path)}
    async with (
        rolloutbus.up(
            workers=2, engine="fake", engine_options=options, store=False, lease=PATIENT
        ) as fleet,
        rolloutbus.connect(fleet.address, name="leave") as client,
    ):
        with token_limit.at(N_BEFORE):
            # Placement is by chance: enough of them that each worker has some.
            streams = await all_under_way([client] * 40, sampling(N_TOKENS))
            leaving = asyncio.create_task(
                client.shutdown_worker("w0", drain=True, deadline_s=LONG_S)
            )
            await one_is(client, "w0", "draining")
        assert_done(await leaving, ["w0"])

        rollouts = [await streamed.rollout() for streamed in streams]
        assert {rollout.n_attempts for rollout in rollouts} == {1}
        assert {rollout.worker for rollout in rollouts} == {"w0", "w1"}
        status = await status_when(client, lambda status: worker_in(status, "w0") is None)
        assert [worker.name for worker in status.workers] == ["w1"]
        rollout = await client.generate(PROMPT, sampling(N_TOKENS), deadline_s=DEADLINE_S)
        assert rollout.worker == "w1"
