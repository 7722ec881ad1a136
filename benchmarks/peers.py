"""Measures what thousands of peers cost a router: time of their hellos, memory afterwards.

All peers of a case say hello at the same moment, as after a restart of the router; then they only
heartbeat. Each link's queues in libzmq are rings that are touched for the first time message by
message, some 128 bytes a heartbeat and at most 64 KiB a peer: the large cases show that growth
stays below that. A small case heartbeats fast until its rings have gone round; from then on nothing
may grow.

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
RING_KIB = 64
"""What the queues of one link hold once all of it has been used."""
STEADY_PEERS = 150
STEADY_BEAT_S = 0.05
RING_BEATS = 700
"""More than go round every ring."""
MAX_GROWTH_MIB = 0.5


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
        "is_bounded": (last["rss_mib"] - first["rss_mib"]) * 1024 <= RING_KIB * n_peers
        and last["fds"] == first["fds"],
    }


async def _steady(watch_s: float) -> dict[str, Any]:
    """Whether anything grows once every link has been used for a while."""
    async with AsyncExitStack() as stack:
        pid, frontend, _ = await stack.enter_async_context(router_process())
        peers = ["clients", frontend, "0", str(STEADY_PEERS), str(STEADY_BEAT_S)]
        child = await stack.enter_async_context(process("-m", "benchmarks.light_peers", *peers))
        await said(child)
        await asyncio.sleep(RING_BEATS * STEADY_BEAT_S)
        first = usage_of(pid)
        await asyncio.sleep(watch_s)
        last = usage_of(pid)
    growth_mib = round(last["rss_mib"] - first["rss_mib"], 2)
    is_flat = growth_mib <= MAX_GROWTH_MIB and last["fds"] == first["fds"]
    n_heartbeats = round(STEADY_PEERS * watch_s / STEADY_BEAT_S)
    return {
        "peers": STEADY_PEERS,
        "heartbeats": n_heartbeats,
        "growth_mib": growth_mib,
        "is_flat": is_flat,
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for n_peers in options.peers:
        cases.append(await _case(n_peers, options.seconds))
        if not options.json:
            print(cases[-1])
    steady = await _steady(options.seconds)
    if not options.json:
        print(steady)
    is_met = steady["is_flat"] and all(case["is_met"] and case["is_bounded"] for case in cases)
    return {
        "is_met": is_met,
        "goal_s": STORM_GOAL_S,
        "cases": cases,
        "steady": steady,
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Thousands of peers at one router")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--seconds", type=float, default=10.0, help="watched after the storm")
    parser.add_argument("--peers", type=int, nargs="+", default=[1_000, 4_000])
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
