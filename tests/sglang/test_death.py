"""An engine that dies is replaced, and loses nobody's request."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.errors import FleetCommandFailed
from rolloutbus.launcher.fleet import command_of
from tests.integration.live_fleet import Streamed
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import ENDLESS
from tests.sglang.processes import SCHEDULER, scheduler_pids

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_REQUESTS, N_BEFORE, N_TOKENS = 15, 30, 800
"""Besides an endless one, which is under way whenever its engine dies."""
PROMPTS = [[3 + i, 10, 20 + i, 7] for i in range(N_REQUESTS)]
ENDLESS_PROMPT = [3, 4, 5]
GREEDY = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=1.0, ignore_eos=True)
ONE = SamplingParams(max_new_tokens=1)
TOLERANCE = 1e-4
CALL_S = 20.0
"""No control call takes so long, also on a busy machine, unless its engine is stuck."""
RESTART_S = 400.0
"""An engine starts within this time on a busy machine."""


@pytest_asyncio.fixture(loop_scope="session")
async def trained(client: RolloutClient, llama: Path) -> AsyncIterator[tuple[int, Reference]]:
    """Weights that are not those of the model's files, on the worker; put right afterwards."""
    reference = Reference(llama)
    before = {name: each.clone() for name, each in reference.model.named_parameters()}
    reference.perturb(seed=1)
    publisher = WeightPublisher(client)
    published = await publisher.publish(
        reference.model.named_parameters(), require="all", deadline_s=DEADLINE_S
    )
    reference.keep(published.version)
    yield published.version, reference
    # A worker must be there to take them.
    await client.generate(PROMPTS[0], ONE, deadline_s=RESTART_S)
    await publisher.publish(before, require="all", deadline_s=DEADLINE_S)


@pytest.mark.shows("death of an engine")
async def test_requests_outlive_the_death_of_a_scheduler_with_the_weights_they_had(
    fleet: Fleet, client: RolloutClient, trained: tuple[int, Reference]
) -> None:
    version, reference = trained
    [scheduler] = scheduler_pids(fleet)
    asked = [(ENDLESS_PROMPT, LONG), *((prompt, GREEDY) for prompt in PROMPTS)]
    endless, *others = streams = [
        Streamed(client, prompt, sampling, versions="latest", deadline_s=2 * RESTART_S)
        for prompt, sampling in asked
    ]
    await endless.reached(N_BEFORE)

    # It must not get on any further while we look at what has come.
    os.kill(scheduler, signal.SIGSTOP)
    n_before = [len(streamed.tokens) for streamed in streams]
    os.kill(scheduler, signal.SIGKILL)

    ended = [await streamed.rollout(RESTART_S) for streamed in others]
    await client.generate(PROMPTS[0], ONE, deadline_s=RESTART_S)  # in case that none was left
    await endless.grown_by(N_BEFORE)
    rollouts = [await endless.cut(), *ended]
    assert rollouts[0].n_attempts > 1
    for prompt, rollout in zip(PROMPTS, ended, strict=True):
        assert len(rollout.tokens) == N_TOKENS
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)
    for (prompt, _), rollout, n_seen in zip(asked, rollouts, n_before, strict=True):
        assert {int(each) for each in rollout.token_versions} == {version}
        truth = reference.fresh(prompt, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
        assert rollout.n_attempts == 1 or rollout.n_resumed >= n_seen
    assert all(streamed.is_contiguous for streamed in streams)
    assert scheduler_pids(fleet) != [scheduler]


@pytest.mark.shows("timeout of an engine's call", "teardown")
async def test_an_engine_that_does_not_answer_a_call_in_time_is_replaced_and_none_is_left(
    llama: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("two engines have to start: `make nightly`, or --exhaustive")
    options = fleet_of(llama)
    assert "engine_options" in options
    options["engine_options"] = {**options["engine_options"], "control_timeout_s": CALL_S}
    async with rolloutbus.up(**options) as fleet, rolloutbus.connect(fleet.address) as client:
        [stuck] = scheduler_pids(fleet)
        os.kill(stuck, signal.SIGSTOP)
        with pytest.raises(FleetCommandFailed, match="w0"):
            await client.flush_cache(deadline_s=2 * CALL_S)

        await client.generate(PROMPTS[0], ONE, deadline_s=RESTART_S)
        [scheduler] = scheduler_pids(fleet)
        assert scheduler != stuck
        log = (fleet.run_dir / "logs" / "w0.log").read_text(encoding="utf-8")
        assert f"no answer to flush_cache after {CALL_S:g} s" in log
    for pid in (stuck, scheduler):
        assert not command_of(pid)[:1] or not command_of(pid)[0].startswith(SCHEDULER)
