"""How close does the router come to libzmq's C proxy, with every feature of the bus switched on?

Both run as one process each between the same load and 8 echo workers, alternately in one run, so
that only the ratio counts: machines drift, ratios within one run hardly do. 200-byte bodies; one
client with 256 requests in flight, then 256 clients with one each. Requests are issued one by
one; what shares a frame is decided by the shipped ports.

    python benchmarks/router_loop.py --json
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq

from benchmarks.loop_clients import SplitLoad
from benchmarks.loop_load import BusClient, Client, Load, PlainClient
from benchmarks.loop_middles import Usage

ROOT = Path(__file__).resolve().parents[1]
N_WORKERS = 8
WORKER_PROCESSES = 2
WINDOW = 256
WARM_UP_S = 0.7


class Side:
    """One middle process with its workers, and the loads that drive it."""

    def __init__(self, name: str, middle: subprocess.Popen[str], frontend: str) -> None:
        self.name = name
        self._middle = middle
        self.frontend = frontend
        self.loads: dict[str, Load | SplitLoad] = {}
        self.rates: dict[str, list[float]] = {}
        self.cpu_us: dict[str, list[float]] = {}
        self.busy: dict[str, list[float]] = {}
        """Part of the time that the deciding thread of the router has computed."""
        self.entries_per_frame: dict[str, list[float]] = {}

    def add_load(self, case: str, n_clients: int, window: int, n_processes: int = 0) -> None:
        """Connect the clients of one case, in so many processes; 0: in this one."""
        if n_processes:
            self.loads[case] = SplitLoad.begin(
                self.name, self.frontend, case, n_clients, window, n_processes
            )
        else:
            names = [f"{case}-{number}" for number in range(n_clients)]
            clients: list[Client] = [self._client(name) for name in names]
            self.loads[case] = Load(clients, window)
        self.rates[case], self.cpu_us[case], self.entries_per_frame[case] = [], [], []
        self.busy[case] = []

    async def sample(self, case: str, seconds: float) -> None:
        """One measurement of one case."""
        load = self.loads[case]
        before, n_before = self._usage(), load.n_answered
        began = time.perf_counter()
        rate = await load.run(seconds)
        wall_s = time.perf_counter() - began
        after, n_done = self._usage(), load.n_answered - n_before
        if load.problem:
            raise SystemExit(load.problem)
        if load.n_lost or load.n_doubled:
            msg = f"{self.name}: {load.n_lost} requests lost, {load.n_doubled} answered twice"
            raise RuntimeError(msg)
        self.rates[case].append(rate)
        self.cpu_us[case].append((after.cpu_s - before.cpu_s) / n_done * 1e6)
        self.busy[case].append((after.loop_s - before.loop_s) / wall_s)
        n_frames = after.n_frames - before.n_frames
        entries = (after.n_entries - before.n_entries) / n_frames if n_frames else 1.0
        self.entries_per_frame[case].append(entries)

    def _client(self, name: str) -> Client:
        if self.name == "router":
            return BusClient(self.frontend, name)
        return PlainClient(self.frontend)

    def _usage(self) -> Usage:
        assert self._middle.stdin is not None
        self._middle.stdin.write("usage\n")
        self._middle.stdin.flush()
        return msgspec.convert(_heard(self._middle), Usage)


@contextmanager
def running_side(
    name: str, endpoints: list[str], n_workers: int = N_WORKERS, *, is_pinned: bool = False
) -> Generator[Side]:
    """Start a middle and its workers; end them afterwards. Pinned: the middle alone on a core."""
    cores = os.sched_getaffinity(0)
    if is_pinned:  # a child has the cores that its parent had when it was started
        os.sched_setaffinity(0, {min(cores)})
    processes = [_started("loop_middles", name, *endpoints)]
    if is_pinned:
        os.sched_setaffinity(0, cores - {min(cores)})
    try:
        frontend, backend = _heard(processes[0])
        for part in range(WORKER_PROCESSES):
            numbers = [str(number) for number in range(part, n_workers, WORKER_PROCESSES)]
            processes.append(_started("loop_workers", name, backend, *numbers))
        side = Side(name, processes[0], frontend)
        try:
            yield side
        finally:
            for load in side.loads.values():
                if isinstance(load, SplitLoad):
                    load.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        os.sched_setaffinity(0, cores)


def _started(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _heard(process: subprocess.Popen[str]) -> Any:  # noqa: ANN401 - JSON
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def loopback(transport: str, folder: str, name: str) -> list[str]:
    """Where a side listens: [frontend, backend]."""
    if transport == "tcp":
        return ["tcp://127.0.0.1:0"] * 2
    return [f"ipc://{folder}/{name}-front", f"ipc://{folder}/{name}-back"]


def _summary(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _report(router: Side, proxy: Side, options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for case in router.loads:
        pairs = zip(router.rates[case], proxy.rates[case], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        report[f"ratio_{case}"] = round(statistics.median(ratios), 3)
        report[f"ratios_{case}"] = [round(ratio, 3) for ratio in ratios]
    report["entries_per_frame"] = round(statistics.median(router.entries_per_frame["window256"]), 1)
    report["entries_per_frame_256_clients"] = round(
        statistics.median(router.entries_per_frame["256_clients"]), 1
    )
    for side in (router, proxy):
        for case in side.loads:
            report[f"{side.name}_rt_per_s_{case}"] = _summary(side.rates[case], 0)
            report[f"{side.name}_cpu_us_per_rt_{case}"] = _summary(side.cpu_us[case], 2)
    report["machine"] = {
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "transport": options.transport,
        "seconds": options.seconds,
        "rounds": options.rounds,
    }
    return report


async def _measure(router: Side, proxy: Side, options: argparse.Namespace) -> dict[str, Any]:
    cases = {"window256": (1, WINDOW), "256_clients": (WINDOW, 1)}
    for case, (n_clients, window) in cases.items():
        for side in (router, proxy):
            side.add_load(case, n_clients, window)
    # Workers are still joining; nothing is measured before everything has run once.
    await asyncio.sleep(1.5)
    for case in cases:
        for side in (router, proxy):
            await side.loads[case].run(WARM_UP_S)
        for number in range(options.rounds):
            sides = (router, proxy) if number % 2 == 0 else (proxy, router)
            for side in sides:
                await side.sample(case, options.seconds)
            if not options.json:
                ours, theirs = router.rates[case][-1], proxy.rates[case][-1]
                print(f"{case}: router {ours:,.0f}/s, proxy {theirs:,.0f}/s: {ours / theirs:.2f}")
    return _report(router, proxy, options)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The router against libzmq's C proxy")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of samples per case")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a sample")
    parser.add_argument("--transport", choices=["tcp", "ipc"], default="tcp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ends = {name: loopback(options.transport, folder, name) for name in ("router", "proxy")}
        with (
            running_side("router", ends["router"]) as router,
            running_side("proxy", ends["proxy"]) as proxy,
        ):
            report = uvloop.run(_measure(router, proxy, options))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
