"""A client in a process of its own: begins long rollouts, says so, and never ends by itself."""

import asyncio
import sys

import rolloutbus
from rolloutbus import SamplingParams

N_STREAMS, N_TOKENS = 20, 30_000


async def main() -> None:
    sampling = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
    async with rolloutbus.connect(sys.argv[1], name="doomed") as client:
        streams = [client.stream([1, 2, 3 + i], sampling) for i in range(N_STREAMS)]
        for stream in streams:
            await anext(stream)
        print("running", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
