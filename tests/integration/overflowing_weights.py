"""Weights that are finite and overflow: what a fleet of one worker does about them."""

import asyncio

import torch

from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.errors import EngineFailed
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, Streamed, status_when
from tests.integration.reference import Weights

PROMPT = [5, 6, 7]
HUGE = 3e38
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
KINDS = {
    "alone": SamplingParams(max_new_tokens=4, ignore_eos=True),
    "truncated": SamplingParams(max_new_tokens=4, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True),
    "greedy": GREEDY,
    "with rules": SamplingParams(max_new_tokens=4, repetition_penalty=1.5, ignore_eos=True),
}
N_EACH = 2
"""Enough to trip a worker, without what fails before its router knows of the weights."""
HURT = ["lm_head.weight", "model.layers.0.input_layernorm.weight"]
"""Names of a Llama: what overflows after the KV cache, and before it."""


async def check_overflow(
    client: RolloutClient, sound: Weights, hurt: str, *, n_endless: int = ENDLESS
) -> None:
    """Publish weights whose `hurt` is huge: requests fail until the sound ones come back."""
    publisher = WeightPublisher(client)
    before = await client.status()
    expected = await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    running = Streamed(client, PROMPT, SamplingParams(max_new_tokens=n_endless, ignore_eos=True))
    await running.reached(10)

    broken = {**sound, hurt: torch.full_like(sound[hurt], HUGE)}
    await publisher.publish(broken, require="all", deadline_s=DEADLINE_S)
    try:
        await _all_fail(client, running)
    finally:
        await publisher.publish(sound, require="all", deadline_s=DEADLINE_S)
    # Its breaker closes by requests that succeed, and nobody asks: other weights mend it.
    await status_when(client, lambda status: not status.troubled)
    again = await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert again.tokens.tolist() == expected.tokens.tolist()
    after = await client.status()
    assert [each.epoch for each in after.workers] == [each.epoch for each in before.workers]


async def _all_fail(client: RolloutClient, running: Streamed) -> None:
    names = [name for name in KINDS for _ in range(N_EACH)]
    asked = [client.generate(PROMPT, KINDS[name], deadline_s=DEADLINE_S) for name in names]
    ended = await asyncio.gather(running.rollout(), *asked, return_exceptions=True)

    for name, error in zip(["running", *names], ended, strict=True):
        assert isinstance(error, EngineFailed), (name, error)
        assert error.code == "broken_weights", name
    assert "are broken" in (await client.status()).troubled["w0"]
