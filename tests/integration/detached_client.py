"""A client in a process of its own: begins detached rollouts, says so, and never ends by itself."""

import asyncio
import sys

import rolloutbus
from rolloutbus import SamplingParams

NAME = "phoenix"
PROMPTS = [[1, 2, 3 + index] for index in range(4)]
N_TOKENS = 40
SEED = 7


async def main() -> None:
    sampling = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True, sampling_seed=SEED)
    async with rolloutbus.connect(sys.argv[1], name=NAME) as client:
        streams = [
            client.stream(prompt, sampling, group=f"prompt-{index}", detached=True)
            for index, prompt in enumerate(PROMPTS)
        ]
        for stream in streams:
            await anext(stream)
        print("running", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
