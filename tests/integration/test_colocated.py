"""The recipe for trainer and engine on one GPU: every round samples with the newest weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from rolloutbus import Rollout
from rolloutbus.examples.colocated import PROMPT, run
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.reference import Reference

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

N_STEPS = 2
TOLERANCE = 1e-4


@pytest.mark.shows("colocated cycle")
async def test_after_each_sleep_the_rollouts_are_those_of_the_new_weights(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, seed=1)
    reference = Reference(tmp_path)
    seen: list[Sequence[Rollout]] = []

    def train(model: LlamaForCausalLM, rollouts: Sequence[Rollout]) -> None:
        seen.append(rollouts)
        reference.perturb(seed=len(seen), scale=0.05)
        model.load_state_dict(reference.model.state_dict())
        reference.keep(len(seen))

    rounds = await run(tmp_path, train, N_STEPS)

    assert seen == rounds[:-1]
    for version, rollouts in enumerate(rounds):
        for rollout in rollouts:
            assert rollout.version_runs == [(version, len(rollout.tokens))]
            truth = reference.fresh(PROMPT, rollout, 1.0)
            np.testing.assert_allclose(rollout.logprobs, truth, atol=TOLERANCE, rtol=0)
    first, last = load_tiny_model(tmp_path).state_dict(), reference.model.state_dict()
    assert not torch.equal(first["lm_head.weight"], last["lm_head.weight"])
