"""Measures what a recorder costs the bus, what it misses, and how much memory it takes.

16 fake workers give 200,000 tokens a second, each token streamed; their router has a tap. A client
keeps a fixed number of requests open and reads all streams. With and without `rolloutbus record` in
turns: tokens heard per second of the one against the other. Only machines that carry the load at
all can tell; `is_loaded` says whether this one did.

    python -m benchmarks.recording --json
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import uvloop

from benchmarks.loop_load import DEADLINE_MS, BusClient
from benchmarks.side_processes import ANY_PORT, machine, process, said, usage_of
from rolloutbus.bus.transport.zmq_topics import SubPort
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry, Placement
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Members

GOAL = 0.97
"""Goal: share of the tokens per second without a recorder."""
LOADED = 0.9
"""Share of the requested tokens per second that the machine must reach for the test to count."""
MAX_RSS_MIB = 256.0
"""Limit of a recorder's memory: 64 MiB of buffers for a slow disk, and the program."""
N_PROCESSES = 4
LOOK_S = 0.5
AT_ONCE = 50
NAME = "benchmark"


class Load(BusClient):
    """Keeps requests open, and counts the tokens that it hears."""

    def __init__(self, endpoint: str, n_open: int, n_tokens: int) -> None:
        body = Generate(
            bytes(8), SamplingParams(max_new_tokens=n_tokens, ignore_eos=True), stream=True
        )
        self._body = pack(body)
        self._cost = Placement("default", cost=n_tokens)
        self._sub = SubPort(self._heard, [NAME])
        self._next = 0
        self._n_open = n_open
        self.n_tokens = self.n_finished = 0
        self.welcomed = asyncio.Event()
        super().__init__(endpoint, NAME)
        self.on_reply = self._finished

    def ask(self, number: int) -> None:
        """Send one `generate`, streamed."""
        rid = f"{NAME}/{number}"
        self._send(Entry("generate", rid, NO_ATTEMPT, "", "", DEADLINE_MS, self._cost, self._body))

    async def begin(self, rollout_s: float) -> None:
        """Open the requests one after the other, so that they do not end all at once."""
        for _ in range(self._n_open):
            self._ask()
            if self._next % AT_ONCE == 0:
                await asyncio.sleep(rollout_s * AT_ONCE / self._n_open)

    async def per_s(self, seconds: float) -> float:
        """Tokens per second over the next seconds."""
        begun_at, n_before = time.perf_counter(), self.n_tokens
        await asyncio.sleep(seconds)
        return (self.n_tokens - n_before) / (time.perf_counter() - begun_at)

    def _receive(self, entries: list[Entry]) -> None:
        others: list[Entry] = []
        for entry in entries:
            if entry.kind == "members":
                for member in cast("Members", unpack(entry)).members:
                    self._sub.connect(member.stream)
            else:
                others.append(entry)
        super()._receive(others)
        if self.is_welcome:
            self.welcomed.set()

    def _heard(self, _: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            self.n_tokens += sum(cast("Deltas", unpack(entry)).counts)

    def _finished(self, _: int) -> None:
        self.n_finished += 1
        self._ask()

    def _ask(self) -> None:
        self._next += 1
        self.ask(self._next)


class Fleet:
    """A router with a tap and its fake workers, in processes. An async context manager."""

    def __init__(self, n_workers: int, step_ms: float) -> None:
        self._n_workers, self._step_ms = n_workers, step_ms
        self._stack = AsyncExitStack()
        self.frontend = ""
        self.pids: dict[str, list[int]] = {"router": [], "workers": []}

    async def __aenter__(self) -> Self:
        settings = {"frontend": ANY_PORT, "backend": ANY_PORT, "tap": ANY_PORT}
        text = json.dumps({**settings, "exit_with_parent": True})
        router = await self._stack.enter_async_context(
            process("-m", "router", "--settings-json", text)
        )
        ready = (await said(router))["ready"]
        self.frontend = ready["frontend"]
        self.pids["router"].append(router.pid)
        per_process = -(-self._n_workers // N_PROCESSES)
        children = [
            await self._stack.enter_async_context(
                process(
                    *("-m", "benchmarks.recording_workers", ready["backend"], str(first)),
                    *(str(min(per_process, self._n_workers - first)), str(self._step_ms)),
                )
            )
            for first in range(0, self._n_workers, per_process)
        ]
        for child in children:
            await said(child)
            self.pids["workers"].append(child.pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def rss_mib(self) -> dict[str, float]:
        """Resident MiB of the router, and of the largest process of workers."""
        return {
            name: max(usage_of(pid)["rss_mib"] for pid in pids) for name, pids in self.pids.items()
        }


@asynccontextmanager
async def _recorder(frontend: str, out: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    command = ("-m", "rolloutbus.cli.main", "record", str(out), "--json", "-r", frontend)
    async with process(*command, stderr=asyncio.subprocess.PIPE) as child:
        assert child.stderr is not None
        await child.stderr.readline()
        yield child


async def _recorded(load: Load, frontend: str, out: Path, seconds: float) -> dict[str, Any]:
    """The load while a recorder listens, and what that one says at its end."""
    rss_mib: list[float] = []

    async def watch(pid: int) -> None:
        while True:
            rss_mib.append(usage_of(pid)["rss_mib"])
            await asyncio.sleep(LOOK_S)

    async with _recorder(frontend, out) as child:
        await load.per_s(seconds / 4)
        watching = asyncio.create_task(watch(child.pid))
        cpu_before_s = usage_of(child.pid)["cpu_s"]
        per_s = await load.per_s(seconds)
        cpu_s = usage_of(child.pid)["cpu_s"] - cpu_before_s
        watching.cancel()
        child.send_signal(signal.SIGINT)
        printed, _ = await child.communicate()
    cores = round(cpu_s / seconds, 2)
    return {**json.loads(printed), "per_s": per_s, "rss_mib": rss_mib, "cores": cores}


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    without: list[float] = []
    recordings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        async with Fleet(options.workers, options.step_ms) as fleet:
            load = Load(fleet.frontend, options.workers * options.slots, options.tokens)
            await load.welcomed.wait()
            await load.begin(options.tokens * options.step_ms / 1000)
            await load.per_s(options.seconds)
            before = fleet.rss_mib()
            for number in range(options.rounds):
                without.append(await load.per_s(options.seconds))
                out = Path(directory, str(number))
                recordings.append(await _recorded(load, fleet.frontend, out, options.seconds))
            after = fleet.rss_mib()
            n_finished = load.n_finished
    asked = options.workers * options.slots * 1000 / options.step_ms
    return {
        **_verdict(without, recordings, asked),
        "rollouts": n_finished,
        "rss_mib": {
            "recorder": max(max(each["rss_mib"]) for each in recordings),
            "recorder_grew": round(
                max(each["rss_mib"][-1] - each["rss_mib"][0] for each in recordings), 1
            ),
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in after.items()},
        },
        "machine": machine(),
    }


def _verdict(
    without: list[float], recordings: list[dict[str, Any]], asked: float
) -> dict[str, Any]:
    ratios = [each["per_s"] / one for each, one in zip(recordings, without, strict=True)]
    heard = [each["heard"] for each in recordings]
    lost = {
        "tap": sum(each["lost_tap"] for each in heard),
        "tokens": sum(each["lost_tokens"] for each in heard),
        "no_room": sum(each["n_dropped"] for each in recordings),
        "problems": [each["problem"] for each in recordings if each["problem"]],
    }
    ratio, per_s = statistics.median(ratios), statistics.median(without)
    is_bounded = max(max(each["rss_mib"]) for each in recordings) <= MAX_RSS_MIB
    return {
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "is_met": ratio >= GOAL and not any(lost.values()) and is_bounded,
        "is_loaded": per_s >= LOADED * asked,
        "ratios": [round(each, 3) for each in ratios],
        "lost": lost,
        "asked_per_s": round(asked),
        "per_s": round(per_s),
        "recorder_cores": round(statistics.median(each["cores"] for each in recordings), 2),
        "records": sum(each["n_records"] for each in recordings),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The bus with and without a recorder")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=125, help="open requests of each worker")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=512, help="of each rollout")
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
