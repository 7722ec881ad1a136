"""Measures how much longer a pause of the fleet takes than a command to one worker.

One client, one router, light workers in a few processes: what is measured is the fan-out, not an
engine. Round trips to one worker and pauses of the fleet take turns, so noise hits both.

    python benchmarks/pause_fanout.py --json
"""

import argparse
import json
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from benchmarks.side_processes import machine, process, router_process, said
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect

GOAL = 8.0
"""Times the round trip to one worker, at 64 workers."""
PER_PROCESS = 32
WARM_UP = 20


async def _timed(client: RolloutClient, n_workers: int, target: str) -> list[float]:
    """Milliseconds of a pause and of the resume after it."""
    times: list[float] = []
    for command in (client.pause, client.resume):
        begun_at = time.perf_counter()
        result = await command(target=target)
        times.append((time.perf_counter() - begun_at) * 1e3)
        assert len(result.by_worker) == (n_workers if target == "fleet" else 1), result
        assert not result.silent, result
    return times


async def _case(n_workers: int, rounds: int) -> dict[str, Any]:
    """Both kinds of round trip against one fleet."""
    single: list[float] = []
    fleet: list[float] = []
    async with AsyncExitStack() as stack:
        _, frontend, backend = await stack.enter_async_context(router_process())
        for first in range(0, n_workers, PER_PROCESS):
            count = min(PER_PROCESS, n_workers - first)
            child = await stack.enter_async_context(
                process("-m", "benchmarks.light_peers", "members", backend, str(first), str(count))
            )
            await said(child)
        client = await stack.enter_async_context(connect(frontend, name="benchmark"))
        for number in range(WARM_UP + rounds):
            alone = await _timed(client, n_workers, f"m{number % n_workers}")
            together = await _timed(client, n_workers, "fleet")
            if number >= WARM_UP:
                single += alone
                fleet += together
    return {
        "workers": n_workers,
        "one_worker_p50_ms": round(statistics.median(single), 3),
        "fleet_p50_ms": round(statistics.median(fleet), 3),
        "fleet_p99_ms": round(statistics.quantiles(fleet, n=100)[98], 3),
        "ratio": round(statistics.median(fleet) / statistics.median(single), 2),
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for n_workers in options.workers:
        case = await _case(n_workers, options.rounds)
        cases.append(case)
        if not options.json:
            print(case)
    return {
        "ratio": cases[-1]["ratio"],
        "goal": GOAL,
        "is_met": cases[-1]["ratio"] <= GOAL,
        "cases": cases,
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Pause and resume of a fleet against one worker")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=200, help="pauses and resumes per case")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64], help="the last counts")
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
