"""What trainers ask of a client, on real engines: chosen workers, batches, process pools."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import OtherFleet, Refused
from rolloutbus.trainer_adapter.client.client import ConnectOptions
from tests.integration import pool_task
from tests.integration.conftest import MAX_CONTEXT, REAL_ENGINES
from tests.integration.live_fleet import DEADLINE_S, START_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET = REAL_ENGINES
FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)


@pytest.mark.shows("data_parallel_rank", "num_inference_engines")
async def test_requests_run_at_the_worker_that_they_name(client: RolloutClient) -> None:
    prompts = [[1, 2, 3]] * 6
    for worker in ("w0", "w1"):
        groups = await client.generate_batch(prompts, FEW, worker=worker, deadline_s=DEADLINE_S)
        assert {rollout.worker for (rollout,) in groups} == {worker}


async def test_a_worker_that_nobody_knows_is_refused_by_its_name(client: RolloutClient) -> None:
    with pytest.raises(Refused, match="'w7' of policy 'default' is here or expected; there are w0"):
        await client.generate([1, 2], FEW, worker="w7", deadline_s=DEADLINE_S)


@pytest.mark.shows("generate", "InferenceEngineInput", "sampling_params", "return_exceptions")
async def test_rows_of_a_batch_end_each_by_itself(client: RolloutClient) -> None:
    samplings = [FEW, SamplingParams(max_new_tokens=3, temperature=-1.0), FEW]
    good, bad, last = await client.generate_batch(
        [[1, 2], [1, 2], [3]], samplings, n=2, on_error="return", deadline_s=DEADLINE_S
    )
    for row in (*good, *last):
        assert isinstance(row, Rollout)
        assert len(row.tokens) == 3
    assert [row.field for row in bad if isinstance(row, Refused)] == 2 * ["sampling.temperature"]


@pytest.mark.shows("max_prompt_length")
async def test_a_prompt_that_is_cut_is_sampled_as_what_is_left_of_it(client: RolloutClient) -> None:
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    prompt = [n % 50 for n in range(40)]
    cut = await client.generate(
        prompt, greedy, max_prompt_tokens=7, truncate="left", deadline_s=DEADLINE_S
    )
    whole = await client.generate(prompt[-7:], greedy, deadline_s=DEADLINE_S)
    assert cut.tokens.tolist() == whole.tokens.tolist()
    assert (cut.n_prompt_tokens, cut.n_prompt_dropped) == (7, 33)
    assert whole.n_prompt_dropped == 0


@pytest.mark.shows("tp_size", "pp_size", "dp_size", "ep_size")
async def test_a_worker_is_asked_for_its_facts_once(client: RolloutClient) -> None:
    facts = await client.facts()
    assert (facts.engine, facts.max_context) == ("transformers", MAX_CONTEXT)
    assert (facts.tp_size, facts.pp_size, facts.dp_size, facts.ep_size) == (1, 1, 1, 1)
    assert await client.facts() is facts
    assert await client.facts("w1") == facts
    with pytest.raises(Refused, match="no worker 'w7' is there; there are w0, w1") as unknown:
        await client.facts("w7")
    assert (unknown.value.code, unknown.value.field) == ("unknown_worker", "worker")
    with pytest.raises(Refused, match="no worker of policy 'critic' is there") as absent:
        await client.facts(policy="critic")
    assert absent.value.code == "not_ready"


def in_a_pool(options: ConnectOptions) -> tuple[list[Rollout], BaseException | None]:
    """What processes of a pool got, and what one of them was refused."""
    context = get_context("spawn")
    with ProcessPoolExecutor(
        2, mp_context=context, initializer=pool_task.begin, initargs=(options,)
    ) as pool:
        futures = [pool.submit(pool_task.sample, [1, 2, n], DEADLINE_S) for n in range(3, 9)]
        refused = pool.submit(pool_task.sample_wrongly, DEADLINE_S)
        return [each.result(START_S) for each in futures], refused.exception(START_S)


async def test_processes_of_a_pool_make_clients_of_their_own(client: RolloutClient) -> None:
    rollouts, refused = await asyncio.to_thread(in_a_pool, client.connect_options)
    for number, rollout in enumerate(rollouts, start=3):
        here = await client.generate(
            [1, 2, number],
            SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True),
            deadline_s=DEADLINE_S,
        )
        assert rollout.tokens.tolist() == here.tokens.tolist()
    assert all(not rollout.rid.startswith("trainer_client/") for rollout in rollouts)
    assert isinstance(refused, Refused)
    assert refused.field == "sampling.temperature"


async def test_what_is_passed_on_names_the_fleet(client: RolloutClient) -> None:
    options = client.connect_options
    assert options["fleet"] == client.fleet != ""
    wrong = rolloutbus.connect(options["address"], fleet="another")
    with pytest.raises(OtherFleet):
        await wrong.open()
