"""The second subscriber of `sglang_bus.py`: watches one client's streams and counts its tokens.

Reads one JSON line per task from standard input and answers with one on standard output.
"""

import asyncio
import json
import sys
import time

import rolloutbus


async def count(rows: rolloutbus.StreamSubscriber, n_wanted: int) -> tuple[int, int]:
    """Tokens and rows seen, once there are `n_wanted` tokens."""
    n_tokens = n_rows = 0
    while n_tokens < n_wanted:
        n_tokens += len((await anext(rows)).tokens)
        n_rows += 1
    return n_tokens, n_rows


async def watch(address: str, client_name: str) -> None:
    """Do what is asked until the input ends."""
    loop = asyncio.get_running_loop()
    began = 0.0
    async with rolloutbus.connect(address, name="watcher") as client:
        await client.status()
        endpoints = [member.stream for member in client.connection.members]
        async with rolloutbus.StreamSubscriber(endpoints, client=client_name) as rows:
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                asked = json.loads(line)
                answer: dict[str, object] = {}
                if asked["kind"] == "start":
                    began = time.perf_counter()
                else:
                    n_tokens, n_rows = await count(rows, asked["n_tokens"])
                    rate = n_tokens / (time.perf_counter() - began)
                    answer = {"tokens_per_s": rate, "n_rows": n_rows, "dropped": rows.n_dropped}
                print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1], sys.argv[2]))
