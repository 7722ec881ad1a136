"""Trajectories of agents: what was sampled stays as it is, and the loss is of it alone."""

import asyncio
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import rolloutbus
from rolloutbus import Rollout
from rolloutbus.examples.agent import BEGIN, GROUP_SIZE, GUESS, LETTERS, loss_of, play, train
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.live_fleet import (
    PATIENT,
    START_S,
    UNHURRIED,
    assert_fake_rollout,
    fake_sampling,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

N_TURNS, N_AGENTS = 16, 24


async def test_sixteen_turns_are_sampled_after_exactly_what_was_said(seed: int) -> None:
    """The fake engine's tokens are a function of the prompt's: one changed token would show."""

    async def act(client: rolloutbus.RolloutClient, number: int) -> None:
        rng = Random(seed * N_AGENTS + number)
        said: list[int] = []
        is_mine: list[int] = []
        rollouts: list[Rollout] = []
        async with client.session(f"agent-{number}", wait_s=START_S) as session:
            for _ in range(N_TURNS):
                # A tool's result, as tokens that no model chose.
                result = rng.choices(range(1, 1000), k=rng.randint(1, 9))
                session.append(result)
                said, is_mine = said + result, is_mine + [0] * len(result)
                n_tokens = rng.randint(1, 12)
                rollout = await session.sample(fake_sampling(n_tokens), deadline_s=START_S)
                assert_fake_rollout(said, rollout, n_tokens)
                said, is_mine = said + rollout.tokens.tolist(), is_mine + [1] * n_tokens
                rollouts.append(rollout)
        transcript = session.transcript
        assert transcript.tokens.tolist() == said
        assert transcript.loss_mask.tolist() == is_mine
        mine = transcript.loss_mask.astype(bool)
        for column, told in (
            (transcript.logprobs, [each.logprobs for each in rollouts]),
            (transcript.token_versions, [each.token_versions for each in rollouts]),
        ):
            assert np.array_equal(column[mine], np.concatenate(told))
        assert not transcript.logprobs[~mine].any()
        assert (transcript.token_versions[~mine] == -1).all()

    options = {"slots": 8, "step_s": 0.002}
    async with (
        rolloutbus.up(
            workers=2, engine="fake", engine_options=options, store=False, lease=UNHURRIED
        ) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        agents = [asyncio.ensure_future(act(client, number)) for number in range(N_AGENTS)]
        await asyncio.wait(agents, return_when=asyncio.FIRST_COMPLETED)
        fleet.kill("w0")  # the sessions there move, and go on
        await asyncio.gather(*agents)


async def test_the_example_trains_on_what_the_agent_chose(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path, seed=0)
    model = load_tiny_model(tmp_path)
    options = {"threads": 1}
    async with (
        rolloutbus.up(model=tmp_path, workers=1, engine_options=options, lease=PATIENT) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        secret = LETTERS[3]
        group = [await play(client, f"first-{number}", secret) for number in range(GROUP_SIZE)]
        assert await train(client, model, n_steps=2) > 0
        after = await client.generate([BEGIN], GUESS, action_mask=LETTERS, versions="latest")

    for transcript, reward in group:
        guesses = transcript.tokens[transcript.loss_mask.astype(bool)]
        assert set(guesses.tolist()) <= set(LETTERS)
        assert (reward > 0) == (guesses[-1] == secret)
        assert secret not in guesses[:-1]
    fresh = load_tiny_model(tmp_path)  # whose weights sampled them: every ratio is 1
    rewards = torch.tensor([reward for _, reward in group])
    advantages = rewards - rewards.mean()
    counts = torch.tensor([float(each.loss_mask.sum()) for each, _ in group])
    expected = -(advantages * counts).sum() / counts.sum()
    torch.testing.assert_close(loss_of(fresh, group), expected, rtol=0, atol=1e-4)
    assert after.version_runs == [(2, 1)]
