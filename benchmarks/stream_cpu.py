"""Measures the cost of a streamed token: one message per engine step against one per request.

Both ways are the shipped code from the worker's step to the subscriber's rows: batcher, codec, PUB
and SUB sockets over loopback TCP. In the one all requests belong to one subscriber, so a step is
one message of columns; in the other each has a topic of its own, so it gets a message of its own.
CPU time of the whole process, both ends and libzmq's threads, in turns.

    python -m benchmarks.stream_cpu --json
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import uvloop

from benchmarks.side_processes import ANY_PORT, machine
from rolloutbus.bus.streams.reassembly import rows_of
from rolloutbus.bus.transport.zmq_topics import PubPort, SubPort
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry, Epoch, Placement
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, SamplingParams
from rolloutbus.engine_worker.settings import StreamSettings
from rolloutbus.engine_worker.worker.requests import RunningRequest
from rolloutbus.engine_worker.worker.streams import StreamBatcher

GOAL = 0.3
"""CPU per token with columns, by that with a message per request."""
SIZES = (16, 64, 256)
"""Requests that run at once."""
HEADLINE = 64
AHEAD_STEPS = 4
"""That a publisher may be ahead of its subscriber, so that nothing is dropped."""
DEADLINE_S = 60.0
VERSION = 1
EPOCH = Epoch("e" * 32 + ".1")

Layout = Literal["columns", "single"]


class Plane:
    """A publisher, a subscriber, and requests that run for ever."""

    def __init__(self, layout: Layout, n_requests: int) -> None:
        self._batcher = StreamBatcher("w0", StreamSettings())
        self._requests = [_request(layout, i) for i in range(n_requests)]
        self._pub = PubPort(ANY_PORT)
        self._sub = SubPort(self._receive)
        self._sub.connect(self._pub.endpoint)
        self._news = asyncio.Event()
        self._wanted = 0
        self.n_heard = 0
        self.n_sent = 0

    async def subscribed(self) -> None:
        """Step until the subscriber hears it; a subscription takes effect some time later."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.n_heard:
                self._step()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        self.n_sent = self.n_heard = 0

    async def cpu_s(self, n_steps: int) -> float:
        """CPU seconds per token, of both ends."""
        n_before = self.n_sent
        begun_s = time.process_time()
        ahead = AHEAD_STEPS * len(self._requests)
        for _ in range(n_steps):
            self._step()
            await self._heard(self.n_sent - ahead)
        await self._heard(self.n_sent)
        return (time.process_time() - begun_s) / (self.n_sent - n_before)

    def close(self) -> None:
        """Close both ends."""
        self._sub.close()
        self._pub.close()

    def _step(self) -> None:
        token = np.int32(self.n_sent).tobytes()
        row, none = memoryview(token), memoryview(b"")
        for request in self._requests:
            request.add(VERSION, row, row, none, 0.0)
            self._batcher.sampled(request, VERSION, 0.0)
        self.n_sent += len(self._requests)
        for effect in self._batcher.flush(EPOCH):
            self._pub.publish(effect.topic, effect.entry)

    async def _heard(self, n_tokens: int) -> None:
        """Wait until so many tokens came; at least for one turn of the loop."""
        await asyncio.sleep(0)
        if self.n_heard >= n_tokens:
            return
        self._wanted = n_tokens
        self._news.clear()
        async with asyncio.timeout(DEADLINE_S):
            await self._news.wait()

    def _receive(self, _: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            for _rid, _attempt, row in rows_of(cast("Deltas", unpack(entry))):
                self.n_heard += len(row.tokens) // 4
        if self.n_heard >= self._wanted:
            self._news.set()


def _request(layout: Layout, number: int) -> RunningRequest:
    client = "trainer" if layout == "columns" else f"trainer-{number}"
    body = Generate(prompt=bytes(4), sampling=SamplingParams(max_new_tokens=10**6), stream=True)
    entry = Entry(
        "generate", f"{client}/{number}", (1, number + 1), route=client, place=Placement("default"),
        body=pack(body),
    )  # fmt: skip
    return RunningRequest(entry, body, 0.0, vocab_size=1 << 16)


async def _measure_size(n_requests: int, options: argparse.Namespace) -> dict[str, Any]:
    planes = {layout: Plane(layout, n_requests) for layout in ("columns", "single")}
    n_steps = max(1, options.tokens // n_requests)
    cpu_s: dict[str, list[float]] = {"columns": [], "single": []}
    for plane in planes.values():
        await plane.subscribed()
        await plane.cpu_s(max(1, n_steps // 10))
    for _ in range(options.rounds):
        for layout, plane in planes.items():
            cpu_s[layout].append(await plane.cpu_s(n_steps))
    lost = sum(plane.n_sent - plane.n_heard for plane in planes.values())
    for plane in planes.values():
        plane.close()
    ratios = [one / other for one, other in zip(cpu_s["columns"], cpu_s["single"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "columns_us": _us(cpu_s["columns"]),
        "single_us": _us(cpu_s["single"]),
        "lost": lost,
    }


def _us(values: Sequence[float]) -> float:
    return round(statistics.median(values) * 1e6, 2)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {str(size): await _measure_size(size, options) for size in SIZES}
    headline = sizes[str(HEADLINE)]
    lost = sum(each["lost"] for each in sizes.values())
    return {
        "ratio": headline["ratio"],
        "goal": GOAL,
        "is_met": headline["ratio"] <= GOAL and lost == 0,
        "requests": HEADLINE,
        "columns_us": headline["columns_us"],
        "single_us": headline["single_us"],
        "lost": lost,
        "by_requests": sizes,
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU per streamed token")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each measurement")
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
