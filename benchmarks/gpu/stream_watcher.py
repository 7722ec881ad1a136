"""The second subscriber of `sglang_bus.py`: watches one client's streams and counts its tokens.

Reads one JSON line per task from standard input and answers with one on standard output.
"""

import asyncio
import json
import sys
import time

import rolloutbus
from rolloutbus.events import Demoted, Tokens


async def count(events: rolloutbus.types.Subscriber, n_wanted: int) -> tuple[int, int]:
    """Numbers of tokens and of pieces received, once there are `n_wanted` tokens."""
    n_tokens = n_pieces = 0
    while n_tokens < n_wanted:
        match await anext(events):
            case Tokens(tokens=tokens):
                n_tokens += len(tokens)
                n_pieces += 1
            case Demoted() as event:
                raise RuntimeError(f"the watcher is too slow: {event}")
            case _:
                pass
    return n_tokens, n_pieces


async def watch(address: str, client_name: str) -> None:
    """Do what is asked until the input ends."""
    loop = asyncio.get_running_loop()
    began = 0.0
    async with rolloutbus.subscribe(address, clients=[client_name]) as events:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            answer: dict[str, object] = {}
            if asked["kind"] == "start":
                began = time.perf_counter()
            else:
                n_tokens, n_rows = await count(events, asked["n_tokens"])
                rate = n_tokens / (time.perf_counter() - began)
                lost = events.counters.tokens_lost
                answer = {"tokens_per_s": rate, "n_rows": n_rows, "dropped": lost}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1], sys.argv[2]))
