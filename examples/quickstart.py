"""Bring a small fleet up, sample a few rollouts, follow one token by token.

Run it with `python -m rolloutbus.examples.quickstart`. It uses the fake engine, so it needs no
model; give `up` another `model` and `engine="transformers"` and the rest stays the same.
"""

import asyncio

import rolloutbus
from rolloutbus import SamplingParams

PROMPT = [1, 2, 3]


async def main() -> None:
    """Generate, generate in groups, stream."""
    async with (
        rolloutbus.up(model="", workers=2, engine="fake") as fleet,
        rolloutbus.connect(fleet.address, name="quickstart") as client,
    ):
        sampling = SamplingParams(max_new_tokens=8)
        rollout = await client.generate(PROMPT, sampling, deadline_s=30.0)
        print(rollout.worker, rollout.tokens, rollout.token_versions, rollout.finish_reason)

        for group in await client.generate_batch([PROMPT, [4, 5]], sampling, n=4, deadline_s=30.0):
            print([each.tokens.tolist() for each in group])

        async for delta in client.stream(PROMPT, sampling, deadline_s=30.0):
            print(delta.start, delta.tokens, delta.version, delta.finish_reason)


if __name__ == "__main__":
    asyncio.run(main())
