"""Prompts with common beginnings, what of them was cached, and what the router knows of it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from rolloutbus import Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.bus.prefix_hashes import marks_of, unpacked
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S, status_when
from tests.integration.session_steps import n_cached

N_OWN = 20
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
LOWEST = 10
"""Below it are tokens of special meaning."""


def random_tokens(n: int, seed: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(LOWEST, vocab_size, n).tolist()


def n_marks_of(prompts: Sequence[Sequence[int]]) -> int:
    """Marks of prompts that have no beginning in common."""
    return sum(len(unpacked(marks_of(np.array(each, "<i4").tobytes()))) for each in prompts)


async def ask(client: RolloutClient, prompt: list[int]) -> Rollout:
    """One token more, and how much of the prompt was cached."""
    want = Want(cached_tokens=True)
    return await client.generate(prompt, ONE_TOKEN, want=want, deadline_s=DEADLINE_S)


async def marks_are(client: RolloutClient, n_marks: int) -> None:
    """Wait until the router knows of so many, at all workers together."""
    await status_when(client, lambda status: sum(w.n_marks for w in status.workers) == n_marks)


@asynccontextmanager
async def marking_client(
    first: RolloutClient, families: Sequence[list[int]]
) -> AsyncGenerator[RolloutClient]:
    """A client that was welcomed by a router which asks for marks; nothing is cached afterwards."""
    for family in families:
        await ask(first, family)
    await marks_are(first, n_marks_of(families))
    router = first.connection.settings.router
    settings = ClientSettings(name="marking", router=router, overtime_s=DEADLINE_S)
    async with RolloutClient(settings) as client:
        yield client
    await first.flush_cache()
    await marks_are(first, 0)


async def common_beginnings_go_where_they_are_cached(
    marking: RolloutClient, families: Sequence[list[int]], vocab_size: int
) -> None:
    homes = [(await ask(marking, family)).worker for family in families]
    await marks_are(marking, n_marks_of(families))
    for n in range(3):
        for family, home in zip(families, homes, strict=True):
            rollout = await ask(marking, family + random_tokens(N_OWN, 100 + n, vocab_size))
            assert rollout.worker == home
            assert n_cached(rollout) >= len(family)
