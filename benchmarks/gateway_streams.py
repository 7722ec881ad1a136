"""What HTTP costs: many server-sent streams at once from the gateway, and the same over the bus.

Alternately in one run, with the fake engine; every stream is checked to hold all its tokens. The
client of HTTP does next to nothing, but shares the cores with the gateway and the fleet.

    python benchmarks/gateway_streams.py --streams 1000 --json
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams

N_TOKENS = 32
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
LONGEST_LINE = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Stream(NamedTuple):
    """One that has ended."""

    first_s: float
    """Until its first token."""
    n_tokens: int


def _prompt(number: int) -> list[int]:
    return [1 + number % 50, 2, 3]


async def _over_bus(client: RolloutClient, number: int) -> Stream:
    begun_at = time.perf_counter()
    first_s, n_tokens = 0.0, 0
    async for delta in client.stream(_prompt(number), SAMPLING):
        first_s = first_s or time.perf_counter() - begun_at
        n_tokens += len(delta.tokens)
    return Stream(first_s, n_tokens)


async def _over_http(host: str, port: int, number: int) -> Stream:
    begun_at = time.perf_counter()
    sampling = {"max_new_tokens": N_TOKENS, "ignore_eos": True}
    asked = {"input_ids": _prompt(number), "sampling_params": sampling, "stream": True}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first_s, last, is_whole = 0.0, b"{}", False
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            is_whole = True
        elif line.startswith(b"data: "):
            first_s = first_s or time.perf_counter() - begun_at
            last = line.removeprefix(b"data: ")
    writer.close()
    assert is_whole, last
    return Stream(first_s, len(json.loads(last)["output_ids"]))


async def _sample(one: Callable[[int], Awaitable[Stream]], n_streams: int) -> dict[str, float]:
    """All streams at once."""
    begun_at = time.perf_counter()
    streams = await asyncio.gather(*(one(number) for number in range(n_streams)))
    elapsed_s = time.perf_counter() - begun_at
    assert {each.n_tokens for each in streams} == {N_TOKENS}, "a stream has lost tokens"
    first_s = sorted(each.first_s for each in streams)
    return {
        "streams_per_s": round(n_streams / elapsed_s, 1),
        "first_p50_ms": round(statistics.median(first_s) * 1e3, 1),
        "first_p99_ms": round(first_s[int(0.99 * n_streams)] * 1e3, 1),
    }


def _memory_mib(fleet: Fleet) -> float:
    pages = int(Path(f"/proc/{fleet.pids['gateway']}/statm").read_text().split()[1])
    return round(pages * PAGE_BYTES / 2**20, 1)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    slots = {"slots": options.streams // 2 + 1, "step_s": 0.01}
    rounds: list[dict[str, dict[str, float]]] = []
    async with (
        rolloutbus.up(engine="fake", workers=2, store=False, http=0, engine_options=slots) as fleet,
        rolloutbus.connect(fleet.address, name="benchmark") as client,
    ):
        host, _, port = fleet.http.removeprefix("http://").partition(":")
        before_mib = _memory_mib(fleet)
        for _ in range(options.rounds):
            seen = {
                "bus": await _sample(lambda i: _over_bus(client, i), options.streams),
                "http": await _sample(lambda i: _over_http(host, int(port), i), options.streams),
            }
            rounds.append(seen)
            if not options.json:
                print(seen)
        after_mib = _memory_mib(fleet)
    ratios = {
        name: round(statistics.median(each["http"][name] / each["bus"][name] for each in rounds), 3)
        for name in rounds[0]["bus"]
    }
    return {
        "rounds": rounds,
        "http_to_bus": ratios,
        "gateway_mib": [before_mib, after_mib],
        "machine": {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Server-sent streams, and streams of the bus")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--streams", type=int, default=1000, help="open at once")
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
