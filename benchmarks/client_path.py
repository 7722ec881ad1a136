"""Measures how many rollouts per second pass the whole bus: client, router, worker, host.

The engine is the fake one, which costs nothing per token, so that only the bus is measured. A
closed loop of 1, 64 and 256 callers; every rollout is checked to hold all its tokens.

    python benchmarks/client_path.py --json
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from typing import Any

import uvloop

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams

PROMPT = list(range(1, 33))
SAMPLING = SamplingParams(max_new_tokens=8, sampling_seed=1, ignore_eos=True)
WARM_UP_S = 0.5


async def _caller(client: RolloutClient, until: float, latencies_s: list[float]) -> None:
    while (begun_at := time.perf_counter()) < until:
        rollout = await client.generate(PROMPT, SAMPLING, deadline_s=30.0)
        assert len(rollout.tokens) == SAMPLING.max_new_tokens
        latencies_s.append(time.perf_counter() - begun_at)


async def _sample(client: RolloutClient, n_callers: int, seconds: float) -> dict[str, float]:
    """Rollouts per second and latencies of one closed loop."""
    latencies_s: list[float] = []
    begun_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(n_callers):
            group.create_task(_caller(client, begun_at + seconds, latencies_s))
    elapsed_s = time.perf_counter() - begun_at
    return {
        "rollouts_per_s": round(len(latencies_s) / elapsed_s, 1),
        "p50_ms": round(statistics.median(latencies_s) * 1000, 2),
        "max_ms": round(max(latencies_s) * 1000, 2),
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    async with (
        rolloutbus.up(engine="fake", workers=options.workers) as fleet,
        rolloutbus.connect(fleet.address, name="benchmark") as client,
    ):
        await _sample(client, 64, WARM_UP_S)
        for n_callers in (1, 64, 256):
            seen = await _sample(client, n_callers, options.seconds)
            report[f"callers_{n_callers}"] = seen
            if not options.json:
                print(f"{n_callers} callers: {seen}")
    report["machine"] = {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Rollouts per second over the whole bus")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a sample")
    parser.add_argument("--workers", type=int, default=2)
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
