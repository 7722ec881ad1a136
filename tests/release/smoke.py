"""An installed rolloutbus brings a fleet up, and samples, with nothing of the repository around."""

import asyncio
from pathlib import Path

import rolloutbus
from rolloutbus import SamplingParams

N_TOKENS = 8


async def main() -> None:
    """One rollout of a fleet with the fake engine."""
    async with (
        rolloutbus.up(workers=1, engine="fake") as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        rollout = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=N_TOKENS))
    assert len(rollout.tokens) == N_TOKENS, rollout
    print(f"{len(rollout.tokens)} tokens, from {Path(rolloutbus.__file__).parent}")


if __name__ == "__main__":
    asyncio.run(main())
