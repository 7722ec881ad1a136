"""What a router costs as workers become more: 1 to 1,000 of them, 16 requests in flight at each.

Two views of the same. *Core*: decoding, decisions and encoding in this process, without sockets;
CPU of one thread, so neighbours on the machine hardly show, and memory. *Sockets*: a router process
over loopback TCP with echo workers, in turns with libzmq's C proxy between the same load; with few
cores the load and the workers take what the router could use, so read the ratio and the CPU of the
router, not the rate. With more workers a frame holds fewer entries, and frames are what costs.

    python -m benchmarks.scale --json
    python -m benchmarks.scale --workers 8 256 --sockets --pinned
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import uvloop

import rolloutbus
from benchmarks.core_paths import BATCH, BOUNDED, PLACE, UNMET, CpuMeter, RoutedFleet, held_bytes
from benchmarks.loop_load import BusClient
from benchmarks.router_loop import WARM_UP_S, WINDOW, Side, loopback, running_side
from benchmarks.side_processes import machine
from rolloutbus.bus.transport.zmq_batches import DRAIN_MESSAGES
from rolloutbus.bus.wire.entry import Placement

Row = dict[str, float]
PER_WORKER = 16
"""Requests in flight."""
MAX_IN_FLIGHT = 10_000
CORE_TRIPS = 1_280
SESSION_WORKERS = 64
"""Opening a session looks at each of them."""
JOIN_S = 60.0
PACE_S = 0.002
CONNECT_S = 1.5
"""Around the proxy, which does not tell who is connected."""
CASE = "closed_loop"
MAX_GROWTH = 2.0
"""CPU of a command with most workers, by that with 8."""
MAX_REQUEST_BYTES = 2048
MAX_SESSION_BYTES = 1024


def in_flight(n_workers: int) -> int:
    """Requests that are open at once, in whole frames of a client."""
    return max(BATCH, min(PER_WORKER * n_workers, MAX_IN_FLIGHT) // BATCH * BATCH)


def core_row(n_workers: int, rounds: int) -> Row:
    """Microseconds of CPU, the least of all rounds: noise only adds."""
    fleet = _busy_fleet(n_workers)
    ticks: list[float] = []
    beats: list[float] = []
    fleet.n_entries = fleet.n_frames = 0
    us_per_trip = _us_per_trip(fleet, rounds)
    entries_per_frame = fleet.n_entries / fleet.n_frames
    for _ in range(rounds):
        ticks.append(_cpu_us(fleet, fleet.tick))
        beats.append(_cpu_us(fleet, fleet.heartbeats) / n_workers)
    return {
        "workers": n_workers,
        "in_flight": in_flight(n_workers),
        "us_per_trip": us_per_trip,
        "us_with_rule": _us_per_trip(_busy_fleet(n_workers, place=BOUNDED), rounds),
        "us_with_unmet_rule": _us_per_refusal(n_workers, rounds),
        "us_to_open_session": _us_per_session(n_workers, rounds),
        "us_in_turns": _us_per_trip(_busy_fleet(n_workers, frames_per_turn=DRAIN_MESSAGES), rounds),
        "us_per_tick": round(min(ticks), 1),
        "us_per_heartbeat": round(min(beats), 2),
        "entries_per_frame": round(entries_per_frame, 2),
    }


def _busy_fleet(n_workers: int, place: Placement = PLACE, frames_per_turn: int = 1) -> RoutedFleet:
    fleet = RoutedFleet(n_workers, MAX_IN_FLIGHT, place, frames_per_turn)
    fleet.keep_open(in_flight(n_workers))
    fleet.round_trips(CORE_TRIPS)
    return fleet


def _us_per_trip(fleet: RoutedFleet, rounds: int) -> float:
    trips = [_cpu_us(fleet, lambda: fleet.round_trips(CORE_TRIPS)) for _ in range(rounds)]
    return round(min(trips) / CORE_TRIPS, 2)


def _us_per_refusal(n_workers: int, rounds: int) -> float:
    fleet = RoutedFleet(n_workers, place=UNMET)
    trips = [_cpu_us(fleet, lambda: fleet.refused(BATCH)) for _ in range(rounds)]
    return round(min(trips) / BATCH, 2)


def _us_per_session(n_workers: int, rounds: int) -> float:
    fleet = RoutedFleet(n_workers)
    opened = [_cpu_us(fleet, lambda: fleet.open_sessions(BATCH)) for _ in range(rounds)]
    return round(min(opened) / BATCH, 2)


def _cpu_us(fleet: RoutedFleet, work: Callable[[], None]) -> float:
    fleet.meter = meter = CpuMeter()
    work()
    return meter.total / 1000


def sessions_row(n_sessions: int) -> Row:
    """What idle sessions and requests in flight cost one router: memory, and CPU of each tick."""
    n_workers = SESSION_WORKERS
    fleet = RoutedFleet(n_workers, slots=MAX_IN_FLIGHT)
    fleet.round_trips(BATCH)
    n_open = in_flight(n_workers)
    per_request = held_bytes(lambda: fleet.keep_open(n_open)) / n_open
    n_traced = n_sessions // 10  # counting the bytes takes longer than opening
    per_session = held_bytes(lambda: fleet.open_sessions(n_traced)) / n_traced
    opening_us = _cpu_us(fleet, lambda: fleet.open_sessions(n_sessions - n_traced))
    return {
        "workers": n_workers,
        "in_flight": n_open,
        "bytes_per_request": round(per_request),
        "sessions": n_sessions,
        "bytes_per_session": round(per_session),
        "us_to_open_one": round(opening_us / (n_sessions - n_traced), 2),
        "us_per_tick": round(min(_cpu_us(fleet, fleet.tick) for _ in range(5)), 1),
    }


async def socket_row(n_workers: int, options: argparse.Namespace, *, is_pinned: bool) -> Row:
    """Medians of the router and of the C proxy, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        ends = {name: loopback("tcp", folder, name) for name in ("router", "proxy")}
        with (
            running_side("router", ends["router"], n_workers, is_pinned=is_pinned) as router,
            running_side("proxy", ends["proxy"], n_workers, is_pinned=is_pinned) as proxy,
        ):
            n_clients = max(options.loads, -(-in_flight(n_workers) // WINDOW))
            for side in (router, proxy):
                window = in_flight(n_workers) // n_clients
                side.add_load(CASE, n_clients, window, options.loads)
            await _joined(router, n_workers)
            await asyncio.sleep(CONNECT_S)
            for side in (router, proxy):
                await side.loads[CASE].run(WARM_UP_S)
            for number in range(options.rounds):
                for side in (router, proxy) if number % 2 == 0 else (proxy, router):
                    await side.sample(CASE, options.seconds)
            rate = statistics.median(router.rates[CASE])
            latencies_s = await _paced(router, rate / 2, options.seconds)
    pairs = zip(router.rates[CASE], proxy.rates[CASE], strict=True)
    p50_s, p99_s = statistics.median(latencies_s), statistics.quantiles(latencies_s, n=100)[98]
    return {
        "workers": n_workers,
        "is_pinned": is_pinned,
        "in_flight": in_flight(n_workers),
        "trips_per_s": round(rate),
        "ratio_to_proxy": round(statistics.median(ours / theirs for ours, theirs in pairs), 3),
        "router_us_per_trip": round(statistics.median(router.cpu_us[CASE]), 2),
        "router_busy": round(statistics.median(router.busy[CASE]), 2),
        "proxy_us_per_trip": round(statistics.median(proxy.cpu_us[CASE]), 2),
        "entries_per_frame": round(statistics.median(router.entries_per_frame[CASE]), 2),
        "p50_ms_at_half_load": round(p50_s * 1000, 2),
        "p99_to_p50_at_half_load": round(p99_s / p50_s, 2),
    }


async def _joined(router: Side, n_workers: int) -> None:
    """Wait until the router knows all workers; before, the load is not what it is to be."""
    async with rolloutbus.connect(router.frontend, name="watcher") as client:
        async with asyncio.timeout(JOIN_S):
            while len((await client.status()).workers) < n_workers:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def _paced(router: Side, rate: float, seconds: float) -> list[float]:
    """Seconds that each command takes at this many a second, evenly in time."""
    asked_at: dict[int, float] = {}
    latencies_s: list[float] = []

    def answered(number: int) -> None:
        latencies_s.append(time.perf_counter() - asked_at.pop(number))

    client = BusClient(router.frontend, "paced")
    client.on_reply = answered
    begun_at = time.perf_counter()
    n_asked = 0
    while (passed_s := time.perf_counter() - begun_at) < seconds:
        while n_asked < passed_s * rate:
            asked_at[n_asked] = time.perf_counter()
            client.ask(n_asked)
            n_asked += 1
        await asyncio.sleep(PACE_S)
    async with asyncio.timeout(JOIN_S):
        while asked_at:  # noqa: ASYNC110
            await asyncio.sleep(PACE_S)
    return latencies_s


def _verdicts(cores: list[Row], held: Row) -> dict[str, float | bool]:
    """The ratios, and the goals that a run on few cores can show."""
    us_of = {row["workers"]: row["us_per_trip"] for row in cores}
    growth = round(us_of[max(us_of)] / us_of[min(us_of, key=lambda n: abs(n - 8))], 2)
    return {
        "us_of_most_workers_to_8": growth,
        "is_growth_met": growth <= MAX_GROWTH,
        "is_memory_met": held["bytes_per_request"] <= MAX_REQUEST_BYTES
        and held["bytes_per_session"] <= MAX_SESSION_BYTES,
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"machine": machine()}
    if not options.sockets:
        report["core"] = [core_row(n, options.rounds) for n in options.workers]
        _show(report["core"], options)
        report["sessions"] = sessions_row(options.sessions)
        _show([report["sessions"]], options)
        report |= _verdicts(report["core"], report["sessions"])
    if not options.core:
        report["sockets"] = [
            uvloop.run(socket_row(n_workers, options, is_pinned=is_pinned))
            for n_workers in options.workers
            for is_pinned in ([False, True] if options.pinned else [False])
        ]
        _show(report["sockets"], options)
    return report


def _show(rows: list[Row], options: argparse.Namespace) -> None:
    """Print a column for each key of the first row."""
    if options.json:
        return
    print("  ".join(rows[0]))
    for row in rows:
        print("  ".join(f"{row[key]!s:>{len(key)}}" for key in rows[0]))
    print(flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The router with 1 to 1,000 workers")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1_000])
    parser.add_argument("--sessions", type=int, default=100_000, help="idle ones, 64 workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a sample")
    loads = max(1, (os.cpu_count() or 1) // 8)
    parser.add_argument(
        "--loads", type=int, default=loads, help="processes of clients; 0: this one"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--core", action="store_true", help="only without sockets")
    only.add_argument("--sockets", action="store_true", help="only over sockets")
    pinned = "each row over sockets also with router and proxy on a core of their own"
    parser.add_argument("--pinned", action="store_true", help=pinned)
    print(json.dumps(_measure(parser.parse_args())))


if __name__ == "__main__":
    main()
