"""What thousands of peers cost a router: how long their hellos take, and what it holds afterwards.

All peers of a case say hello at the same moment, as after a restart of the router; then they only
beat, and nothing may grow.

    python benchmarks/peers.py --json
"""

import argparse
import asyncio
import json
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import uvloop

from benchmarks.side_processes import machine, process, router_process, said, usage_of

STORM_GOAL_S = 10.0
N_PROCESSES = 4
SETTLE_S = 3.0
MAX_GROWTH_MIB = 2.0


async def _case(n_peers: int, watch_s: float) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        pid, frontend, _ = await stack.enter_async_context(router_process())
        empty = usage_of(pid)
        begun_at = time.perf_counter()
        bounds = [n_peers * number // N_PROCESSES for number in range(N_PROCESSES + 1)]
        children = [
            await stack.enter_async_context(
                process("-m", "benchmarks.light_peers", "clients", frontend, str(a), str(b - a))
            )
            for a, b in pairwise(bounds)
        ]
        storms = [(await said(child))["welcomed_s"] for child in children]
        all_in_s = time.perf_counter() - begun_at
        await asyncio.sleep(SETTLE_S)
        first = usage_of(pid)
        await asyncio.sleep(watch_s)
        last = usage_of(pid)
    return {
        "peers": n_peers,
        "storm_s": round(max(storms), 2),
        "with_process_start_s": round(all_in_s, 2),
        "is_met": max(storms) <= STORM_GOAL_S,
        "empty": empty,
        "after_storm": first,
        "later": last,
        "kib_per_peer": round((first["rss_mib"] - empty["rss_mib"]) * 1024 / n_peers, 1),
        "cpu_share": round((last["cpu_s"] - first["cpu_s"]) / watch_s, 3),
        "is_flat": last["rss_mib"] - first["rss_mib"] <= MAX_GROWTH_MIB
        and last["fds"] == first["fds"],
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for n_peers in options.peers:
        cases.append(await _case(n_peers, options.seconds))
        if not options.json:
            print(cases[-1])
    is_met = all(case["is_met"] and case["is_flat"] for case in cases)
    return {"is_met": is_met, "goal_s": STORM_GOAL_S, "cases": cases, "machine": machine()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Thousands of peers at one router")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--seconds", type=float, default=10.0, help="watched after the storm")
    parser.add_argument("--peers", type=int, nargs="+", default=[1_000, 4_000])
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
