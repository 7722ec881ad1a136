"""Requests that stay open while something else is measured."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rolloutbus import RolloutClient, SamplingParams

PROMPT = list(range(3, 19))
SAMPLING = SamplingParams(max_new_tokens=256, ignore_eos=True)


@asynccontextmanager
async def open_requests(
    client: RolloutClient, n_open: int, deadline_s: float
) -> AsyncGenerator[None]:
    """Keep `n` requests open until the block ends; each has `deadline_s` seconds."""

    async def lane() -> None:
        while True:
            await client.generate(PROMPT, SAMPLING, deadline_s=deadline_s)

    lanes = [asyncio.create_task(lane()) for _ in range(n_open)]
    try:
        yield
    finally:
        for each in lanes:
            each.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
