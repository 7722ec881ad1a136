"""What do keys cost? The router with CURVE on every link against the same router without.

Both run as one process each between the same load and 8 echo workers, over loopback TCP,
alternately in one run, so that only the ratio counts. One client, 256 requests of 200 bytes in
flight: the shape in which entries share frames.

    python benchmarks/curve_cost.py --json
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.loop_load import BusClient, Load
from benchmarks.loop_workers import EchoWorker
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.launcher.plan import FleetKeys
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[1]
N_WORKERS = 8
WORKER_PROCESSES = 2
WINDOW = 256
WARM_UP_S = 0.7
ANYWHERE = "tcp://127.0.0.1:0"


def _security(keys: str, name: str) -> SecuritySettings | None:
    return FleetKeys(Path(keys)).security_of(name) if keys else None


async def run_router(keys: str) -> None:
    """Serve; print the CPU seconds used so far for every line that is read."""
    settings = RouterSettings(ANYWHERE, ANYWHERE, security=_security(keys, "router"))
    async with RouterActor(settings, "benchmark") as router:

        def answer() -> None:
            if not sys.stdin.readline():
                router.stop()
                return
            print(time.process_time(), flush=True)

        print(json.dumps(router.endpoints), flush=True)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), answer)
        await router.stopped()


async def run_workers(keys: str, backend: str, *names: str) -> None:
    """Echo until the process is ended."""
    _workers = [EchoWorker(backend, name, dialer_of(_security(keys, name))) for name in names]
    await asyncio.Event().wait()


class Side:
    """One router, its workers and its client."""

    def __init__(self, router: subprocess.Popen[str], frontend: str, keys: str) -> None:
        self._router = router
        self.rates: list[float] = []
        self.cpu_us: list[float] = []
        client = BusClient(frontend, "operator", dialer_of(_security(keys, "operator")))
        self.load = Load([client], WINDOW)

    async def sample(self, seconds: float) -> None:
        """One measurement."""
        before, n_before = self._cpu_s(), self.load.n_answered
        self.rates.append(await self.load.run(seconds))
        self.cpu_us.append((self._cpu_s() - before) / (self.load.n_answered - n_before) * 1e6)

    def _cpu_s(self) -> float:
        assert self._router.stdin is not None
        self._router.stdin.write("usage\n")
        self._router.stdin.flush()
        return float(_heard(self._router))


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.curve_cost", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def processes(keys: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A router and its workers; yields the router and its frontend."""
    started = [_started("--router", keys)]
    try:
        frontend, backend = json.loads(_heard(started[0]))
        names = [f"w{number}" for number in range(N_WORKERS)]
        started += [
            _started("--workers", keys, backend, *names[part::WORKER_PROCESSES])
            for part in range(WORKER_PROCESSES)
        ]
        yield started[0], frontend
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def measure(seconds: float, rounds: int, keys: str) -> dict[str, Any]:
    """Alternate between the two routers."""
    with processes("") as plain, processes(keys) as curve:
        sides = {"plain": Side(*plain, ""), "curve": Side(*curve, keys)}
        await asyncio.sleep(1.5)  # workers are still joining
        for side in sides.values():
            await side.load.run(WARM_UP_S)
        for number in range(rounds):
            for side in list(sides.values())[:: 1 if number % 2 else -1]:
                await side.sample(seconds)
        pairs = zip(sides["curve"].rates, sides["plain"].rates, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
    report: dict[str, Any] = {"ratio": round(statistics.median(ratios), 3)}
    pairs = zip(sides["curve"].cpu_us, sides["plain"].cpu_us, strict=True)
    report["cpu_ratio"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    report["ratios"] = [round(ratio, 3) for ratio in ratios]
    for name, side in sides.items():
        report[f"{name}_rt_per_s"] = round(statistics.median(side.rates))
        report[f"{name}_router_cpu_us_per_rt"] = round(statistics.median(side.cpu_us), 2)
        report[f"{name}_lost"] = side.load.n_lost
    return report | {"load_1m": os.getloadavg()[0], "cores": os.cpu_count()}


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] in (["--router"], ["--workers"]):
        role, *arguments = sys.argv[1:]
        uvloop.run((run_router if role == "--router" else run_workers)(*arguments))
        return
    parser = argparse.ArgumentParser(description="The router with CURVE against without")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of samples")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        members = dict.fromkeys((f"w{number}" for number in range(N_WORKERS)), "worker")
        FleetKeys(Path(folder)).make(members)  # type: ignore[arg-type]
        report = uvloop.run(measure(options.seconds, options.rounds, folder))
    if not options.json:
        print(f"with CURVE {report['ratio']:.2f} of the rate without")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
