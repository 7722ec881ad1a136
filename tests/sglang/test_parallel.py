"""An engine of several schedulers, however the model is spread over them, acts as a single one."""

import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams, Want, WeightPublisher
from rolloutbus.bus.wire.messages.control import Flushed
from rolloutbus.bus.wire.messages.control import Load as EngineLoad
from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.errors import BusError
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import Streamed
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S, KEEPING
from tests.sglang.fleets import fleet_of
from tests.sglang.models import ENDLESS, VOCAB_SIZE, save_model
from tests.sglang.processes import scheduler_pids
from tests.sglang.single_requests import Case, assert_same, resumed, run
from tests.sglang.training import (
    MODES,
    N_TOKENS,
    PROMPTS,
    TEMPERATURE,
    TOLERANCE,
    Load,
    Trainer,
    assert_greedy_is_true,
    assert_true,
)
from tests.sglang.update_hook import COMPLAINT

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESTART_S = 400.0
CHUNK = 128
"""The longest prompts are computed in several steps."""
N_BEFORE = 20
N_SCHEDULERS = 2
SPLITS: dict[str, dict[str, int]] = {
    "tensors": {"tp_size": 2},
    "replicas": {"dp_size": 2},
    "stages": {"pp_size": 2},
}
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=TEMPERATURE, ignore_eos=True)
LOW, HIGH = 128, 384
TRUNCATED = SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.5, ignore_eos=True)
NOT_YET = SamplingParams(
    max_new_tokens=24,
    temperature=1.0,
    min_new_tokens=6,
    stop_token_ids=[*range(HIGH, VOCAB_SIZE)],
    ignore_eos=True,
)
TO_THE_END = SamplingParams(max_new_tokens=400, temperature=TEMPERATURE, ignore_eos=True)


@dataclass
class Running:
    """An engine of two schedulers, and its trainer."""

    sizes: dict[str, int]
    fleet: Fleet
    trainer: Trainer
    once: Path
    """Where this file is, one of the schedulers fails to take the next weights."""

    @property
    def client(self) -> RolloutClient:
        return self.trainer.client


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All splits; one that the seed draws in a sample."""
    options = metafunc.config.option
    splits = [*SPLITS] if options.exhaustive else [random.Random(options.seed).choice([*SPLITS])]
    metafunc.parametrize("split", splits, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(split: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp(split)
    model = save_model("llama", folder / "model")
    failing = {
        "name": "failing",
        "target_modules": ["model.norm"],
        "hook_factory": "tests.sglang.update_hook:hook_of",
        "config": {"once": str(folder / "once")},
    }
    usable = sorted(os.sched_getaffinity(0))
    arguments = {"chunked_prefill_size": CHUNK, "forward_hooks": [failing]}
    options = fleet_of(model, **arguments, **KEEPING, **SPLITS[split])
    with pytest.MonkeyPatch.context() as patch:
        if "tp_size" in SPLITS[split]:
            # SGLang wants to be told the core of each rank on a CPU.
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{usable[0]}|{usable[-1]}")
        async with rolloutbus.up(**options) as fleet:
            settings = ClientSettings(name="trainer", router=fleet.address, overtime_s=DEADLINE_S)
            async with RolloutClient(settings) as client:
                publisher = WeightPublisher(client)
                trainer = Trainer(client, publisher, Reference(model))
                yield Running(SPLITS[split], fleet, trainer, folder / "once")
                publisher.forget()


@pytest.mark.shows("tp_size", "pp_size", "dp_size", "ep_size")
async def test_every_scheduler_is_there_and_told_of(running: Running) -> None:
    assert len(scheduler_pids(running.fleet)) == N_SCHEDULERS
    facts = await running.client.facts()
    sizes = {name: getattr(facts, name) for name in ("tp_size", "pp_size", "dp_size", "ep_size")}
    assert sizes == {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1} | running.sizes
    await assert_greedy_is_true(running.trainer, 0)
    # The first weight that is asked for, before anything else was read.
    name, weight = next(iter(running.trainer.reference.model.named_parameters()))
    fetched = await running.client.get_weights(name, "w0")
    assert fetched.content.tobytes() == weight.detach().contiguous().numpy().tobytes()
    report = await running.client.check_weights()
    assert report.is_ok
    named = dict(running.trainer.reference.model.named_parameters())
    assert report.by_worker["w0"].n_tensors == len(named)


async def test_requests_are_shared_out(running: Running) -> None:
    await assert_greedy_is_true(running.trainer, 0)
    gauges = (await running.client.get_load()).only(EngineLoad).gauges
    served = "total_prefill_uncached_tokens"
    assert gauges[served] > 0
    assert (gauges.get(f"dp1.{served}", 0) > 0) == ("dp_size" in running.sizes), gauges


@pytest.mark.shows(
    "tensor parallel updates",
    "inference_engine_tensor_parallel_size",
    "tensor_parallel_size",
    "inference_engine_pipeline_parallel_size",
    "inference_engine_data_parallel_size",
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_flight", MODES)
async def test_each_version_is_true_in_every_scheduler(
    running: Running, in_flight: InFlight
) -> None:
    trainer = running.trainer
    load = Load(trainer.client)
    await load.begun()
    version = (await trainer.publish(in_flight)).version
    rollouts = await load.stop()

    assert_true(trainer.reference, rollouts, by_runs=in_flight == "keep")
    assert all(len(rollout.tokens) == N_TOKENS for _, rollout in rollouts)
    if in_flight == "finish_old":
        assert all(len(rollout.version_runs) == 1 for _, rollout in rollouts)
    # Nothing of what was cached under older weights is used, by any of them.
    for _ in range(N_SCHEDULERS):
        await assert_greedy_is_true(trainer, version)
    name, weight = next(iter(trainer.reference.model.named_parameters()))
    fetched = await trainer.client.get_weights(name, "w0")
    assert fetched.version == version
    assert fetched.content.tobytes() == weight.detach().contiguous().numpy().tobytes()


async def test_rules_hold_wherever_tokens_are_sampled(running: Running) -> None:
    want = Want(logprobs_of=[*range(LOW)], sampling_mask=True)
    for prompt in PROMPTS[:4]:
        rollout = await running.client.generate(
            prompt, TRUNCATED, want=want, action_mask=[*range(3, LOW)], deadline_s=DEADLINE_S
        )
        counts = rollout.arrays["sampling_mask_counts"]
        supports = np.split(rollout.arrays["sampling_mask"], np.cumsum(counts)[:-1])
        for i, token in enumerate(rollout.tokens.tolist()):
            assert token in supports[i]
            # Only low ids can be sampled: their logprobs are the whole distribution.
            left = rollout.arrays["logprobs_of"][i][supports[i]].astype(float)
            expected = rollout.logprobs[i] - np.log(np.exp(left).sum())
            assert abs(rollout.behaviour_logprobs[i] - expected) < TOLERANCE

        at_least = await running.client.generate(prompt, NOT_YET, deadline_s=DEADLINE_S)
        assert max(at_least.tokens[: NOT_YET.min_new_tokens]) < HIGH
        if len(at_least.tokens) < NOT_YET.max_new_tokens:
            assert at_least.tokens[-1] >= HIGH


async def test_a_pause_an_update_and_an_abort_reach_all(running: Running) -> None:
    trainer, client = running.trainer, running.client
    prompts = PROMPTS[:4]
    streams = [Streamed(client, each, LONG, deadline_s=DEADLINE_S) for each in prompts]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    await client.pause("retract" if "pp_size" in running.sizes else "in_place")
    for streamed in streams:
        assert await streamed.stands_still()
    version = (await trainer.publish("retract")).version
    for streamed in streams:
        assert await streamed.stands_still()
    await client.resume()
    for prompt, streamed in zip(prompts, streams, strict=True):
        await streamed.grown_by(N_BEFORE)
        rollout = await streamed.cut()
        assert [run for run, _ in rollout.version_runs][-1] == version
        assert_true(trainer.reference, [(prompt, rollout)])


async def test_all_schedulers_end_a_request_at_its_stop_text(running: Running) -> None:
    favourite = {300: 100.0}
    stopping = SamplingParams(
        max_new_tokens=20, temperature=0.0, logit_bias=favourite, stop=["<t300>" * 3]
    )
    case = Case(PROMPTS[0], stopping)
    whole = await run(running.client, case)
    assert (whole.tokens.tolist(), whole.finish_reason) == ([300] * 3, "stop")
    for _ in range(N_SCHEDULERS):
        assert_same(await run(running.client, case), whole)
    for n_kept in (1, 3):
        assert_same(await resumed(running.client, case, whole, n_kept), whole)


async def test_caches_are_flushed_and_memory_sleeps_everywhere(running: Running) -> None:
    trainer, client = running.trainer, running.client
    [version] = {int(v) for v in (await client.generate(PROMPTS[0], TO_THE_END)).token_versions}
    assert (await client.flush_cache()).only(Flushed).n_tokens > 0
    assert (await client.flush_cache()).only(Flushed).n_tokens == 0
    await client.sleep(["weights", "kv_cache"])
    await client.wake_up(["weights", "kv_cache"])
    for _ in range(N_SCHEDULERS):
        await assert_greedy_is_true(trainer, version)


async def test_a_scheduler_that_takes_no_version_spoils_it_for_all(running: Running) -> None:
    trainer, client = running.trainer, running.client
    before = (await trainer.publish()).version
    running.once.touch()
    trainer.reference.perturb(trainer.seed + 100)
    try:
        published = await trainer.publisher.publish(
            trainer.reference.model.named_parameters(), require="all", deadline_s=DEADLINE_S
        )
    except BusError as error:
        problems = [str(error)]
    else:
        problems = [*published.quarantined.values()]
    assert not running.once.exists()
    assert any(COMPLAINT in problem for problem in problems), problems

    # Whatever the router brings to it is whole, and in all of them.
    mended = await client.generate(PROMPTS[0], TO_THE_END, deadline_s=DEADLINE_S)
    [version] = {int(each) for each in mended.token_versions}
    assert version >= before
    if version > before:
        trainer.reference.keep(version)
    for _ in range(N_SCHEDULERS):
        await assert_greedy_is_true(trainer, version)


async def test_rollouts_outlive_the_death_of_one_scheduler(
    running: Running, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("takes a minute, and test_death.py kills one: `make nightly`, or --exhaustive")
    trainer, client = running.trainer, running.client
    version = (await trainer.publish()).version
    prompts = PROMPTS[:4]
    streams = [Streamed(client, each, TO_THE_END, deadline_s=2 * RESTART_S) for each in prompts]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    victim = random.choice(scheduler_pids(running.fleet))
    os.kill(victim, signal.SIGKILL)
    for prompt, streamed in zip(prompts, streams, strict=True):
        rollout = await streamed.rollout(RESTART_S)
        assert len(rollout.tokens) == TO_THE_END.max_new_tokens
        assert {int(each) for each in rollout.token_versions} == {version}
        truth = trainer.reference.fresh(prompt, rollout, TEMPERATURE)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
    assert len(scheduler_pids(running.fleet)) == N_SCHEDULERS
