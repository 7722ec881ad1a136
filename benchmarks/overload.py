"""Measures what the bus delivers when clients ask for more than it can do.

An open loop offers 1, 2, 5 and 10 times the capacity of a small fleet of fake engines. Useful is
what ends well before its deadline; everything else should be turned away at once. Afterwards the
load falls to 0.8 times the capacity, and the time is taken until all goes well again.

    python benchmarks/overload.py --json
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import uvloop

import rolloutbus
from benchmarks.side_processes import machine, usage_of
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.errors import BusError, DeadlineExceeded, Refused, RequestExpired

WORKERS = 2
SLOTS = 8
ENGINE = {"slots": SLOTS, "step_s": 0.01}
SAMPLING = SamplingParams(max_new_tokens=16, sampling_seed=1, ignore_eos=True)
PROMPT = list(range(1, 33))
DEADLINE_S = 2.0
FACTORS = (1.0, 2.0, 5.0, 10.0)
CALM_FACTOR = 0.8
CALM_S = 10.0
WELL_SHARE = 0.95
"""Of the requests of one second that end well: all is well again."""
MAX_GROWTH_MIB = 32.0
GOALS = {"goodput_share": 0.9, "refusal_times_rtt": 20.0, "recovery_s": 5.0}


@dataclass
class Seen:
    """What became of the requests of one phase."""

    ended: Counter[str] = field(default_factory=Counter[str])
    ok_at: list[float] = field(default_factory=list[float])
    """When those that ended well had been asked, seconds into the phase."""
    asked_at: list[float] = field(default_factory=list[float])
    latencies_s: list[float] = field(default_factory=list[float])
    refused_after_s: list[float] = field(default_factory=list[float])


async def _one(client: RolloutClient, seen: Seen, phase_at: float) -> None:
    asked_at = time.perf_counter()
    seen.asked_at.append(asked_at - phase_at)
    try:
        await client.generate(PROMPT, SAMPLING, deadline_s=DEADLINE_S)
    except Refused as error:
        seen.ended[f"refused_{error.code}"] += 1
        seen.refused_after_s.append(time.perf_counter() - asked_at)
    except (RequestExpired, DeadlineExceeded):
        seen.ended["expired"] += 1
    except BusError as error:
        seen.ended[type(error).__name__] += 1
    else:
        seen.ended["ok"] += 1
        seen.ok_at.append(asked_at - phase_at)
        seen.latencies_s.append(time.perf_counter() - asked_at)


async def _offer(client: RolloutClient, rate: float, seconds: float, rng: Random) -> Seen:
    """Poisson arrivals at `rate` per second; returns when the last one has ended."""
    seen = Seen()
    begun_at = due_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while due_at < begun_at + seconds:
            due_at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            group.create_task(_one(client, seen, begun_at))
    return seen


async def _capacity(client: RolloutClient, seconds: float) -> float:
    """Requests per second of a closed loop that keeps every slot busy."""
    until = time.perf_counter() + seconds
    n_done = 0

    async def caller() -> None:
        nonlocal n_done
        while time.perf_counter() < until:
            await client.generate(PROMPT, SAMPLING, deadline_s=60.0)
            n_done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS * SLOTS):
            group.create_task(caller())
    return n_done / seconds


async def _round_trip_ms(client: RolloutClient) -> float:
    times: list[float] = []
    for _ in range(200):
        begun_at = time.perf_counter()
        await client.status()
        times.append((time.perf_counter() - begun_at) * 1e3)
    return statistics.median(times)


def _recovery_s(seen: Seen) -> float:
    """Seconds into the calm phase after which every full second went well."""
    seconds = int(CALM_S)
    asked = Counter(int(at) for at in seen.asked_at)
    ok = Counter(int(at) for at in seen.ok_at)
    bad = [second for second in range(seconds) if ok[second] < WELL_SHARE * asked[second]]
    return float(bad[-1] + 1) if bad else 0.0


def _percentile_ms(values: list[float], share: float) -> float | None:
    """The percentile in milliseconds; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


async def _level(client: RolloutClient, rate: float, seconds: float, rng: Random) -> dict[str, Any]:
    seen = await _offer(client, rate, seconds, rng)
    return {
        "offered_per_s": round(len(seen.asked_at) / seconds, 1),
        "goodput_per_s": round(len(seen.ok_at) / seconds, 1),
        "ended": dict(seen.ended),
        "ok_p50_ms": _percentile_ms(seen.latencies_s, 0.5),
        "refusal_p50_ms": _percentile_ms(seen.refused_after_s, 0.5),
        "refusal_p99_ms": _percentile_ms(seen.refused_after_s, 0.99),
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = Random(options.seed)
    levels: dict[str, Any] = {}
    async with (
        rolloutbus.up(engine="fake", workers=WORKERS, engine_options=ENGINE, store=False) as fleet,
        rolloutbus.connect(fleet.address, name="benchmark") as client,
    ):
        await _capacity(client, 1.0)
        round_trip_ms = await _round_trip_ms(client)
        capacity = await _capacity(client, 3.0)
        before = usage_of(fleet.pids["router"])
        for factor in FACTORS:
            level = await _level(client, factor * capacity, options.seconds, rng)
            level["router"] = usage_of(fleet.pids["router"])
            levels[f"{factor:g}x"] = level
            if not options.json:
                print(f"{factor:g}x: {level}")
        calm = await _offer(client, CALM_FACTOR * capacity, CALM_S, rng)
    report = _judged(levels, round_trip_ms, _recovery_s(calm), before["rss_mib"])
    shown = {"capacity_per_s": round(capacity, 1), "round_trip_ms": round(round_trip_ms, 3)}
    return {**report, **shown, "seed": options.seed, "levels": levels, "machine": machine()}


def _judged(
    levels: dict[str, Any], round_trip_ms: float, recovery_s: float, before_mib: float
) -> dict[str, Any]:
    last = levels[f"{FACTORS[-1]:g}x"]
    share = last["goodput_per_s"] / max(level["goodput_per_s"] for level in levels.values())
    refusal_ms = last["refusal_p99_ms"]
    times_rtt = None if refusal_ms is None else round(refusal_ms / round_trip_ms, 1)
    grown_mib = round(last["router"]["rss_mib"] - before_mib, 1)
    return {
        "is_met": share >= GOALS["goodput_share"]
        and times_rtt is not None
        and times_rtt <= GOALS["refusal_times_rtt"]
        and recovery_s <= GOALS["recovery_s"]
        and grown_mib <= MAX_GROWTH_MIB,
        "goodput_share": round(share, 3),
        "refusal_times_rtt": times_rtt,
        "recovery_s": recovery_s,
        "router_grown_mib": grown_mib,
        "goals": GOALS,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Goodput and refusals under overload")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each level")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
