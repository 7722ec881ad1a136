"""A subscriber in a process of its own: prints every row of one client's streams as JSON."""

import asyncio
import json
import sys

from rolloutbus import StreamSubscriber


async def main() -> None:
    async with StreamSubscriber(sys.argv[2:], client=sys.argv[1]) as subscriber:
        async for row in subscriber:
            seen = {
                "worker": row.worker,
                "rid": row.rid,
                "seq": row.seq,
                "tokens": row.tokens.tolist(),
                "logprobs": row.logprobs.tolist(),
                "finish": row.finish,
            }
            print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
