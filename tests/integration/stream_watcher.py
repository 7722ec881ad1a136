"""A subscriber in a process of its own: prints what it is told of a client's streams as JSON."""

import asyncio
import json
import sys

from rolloutbus import subscribe
from rolloutbus.events import Finished, Tokens


async def main() -> None:
    async with subscribe(sys.argv[1], clients=[sys.argv[2]]) as subscriber:
        async for event in subscriber:
            if isinstance(event, Tokens | Finished):
                seen = {
                    "worker": event.worker,
                    "rid": event.rid,
                    "start": event.start if isinstance(event, Tokens) else 0,
                    "tokens": event.tokens.tolist(),
                    "logprobs": event.logprobs.tolist(),
                    "finish": event.finish_reason if isinstance(event, Finished) else None,
                }
                print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
