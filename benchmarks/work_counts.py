"""Counts the work of the hot paths, and compares it with what is committed: is it still as fast?

A time would say which machine it was. What is counted instead is the same on every machine with
the same CPython: bytecodes that the interpreter executes, calls of functions written in C, and
bytes that frames and tables take. Python is most of what these paths cost (docs/performance.md);
what happens inside a C function is not seen, only that it is called.

    python -m benchmarks.work_counts            compare with benchmarks/work_counts.json
    make baseline                               write that file again
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from benchmarks.core_paths import (
    BATCH,
    BODY,
    BOUNDED,
    DEADLINE_MS,
    GENERATE,
    PLACE,
    RESULT,
    Meter,
    RoutedFleet,
    StreamedRollouts,
    held_bytes,
)
from rolloutbus.bus.wire.codec import decode_batch, encode_batch, pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry, Placement

P = ParamSpec("P")
R = TypeVar("R")
Counts = dict[str, float]
"""`PATH/UNIT` -> how many for one of what the path is named for."""

BASELINE = Path(__file__).with_name("work_counts.json")
MARGIN = 0.10
PYTHON = ".".join(platform.python_version_tuple()[:2])
"""Bytecodes are those of a minor version of CPython."""
SEED = "0"
"""Of hashes: the order of sets is part of what is executed."""
N_OPEN = 2048
N_SESSIONS = 1024


class Bytecodes:
    """Bytecodes executed by the calls that go through it, and by all that they call."""

    def __init__(self) -> None:
        self.total = 0

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and count."""
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, _event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._executed

    def _executed(self, _frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        self.total += event == "opcode"
        return self._executed


class CCalls:
    """Calls of C functions made by the calls that go through it."""

    def __init__(self) -> None:
        self.total = 0

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and count."""
        self.total -= 1  # the call that ends the counting
        before = sys.getprofile()
        sys.setprofile(self._happened)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(before)

    def _happened(self, _frame: FrameType, event: str, _: object) -> None:
        self.total += event == "c_call"


def router_batched(meter: Meter) -> float:
    """Work of the router for a request, 8 workers, 64 requests in a client's frame."""
    return _round_trips(meter, n_workers=8, per_frame=BATCH, n=256)


def router_single(meter: Meter) -> float:
    """The same for a request that has a frame of its own."""
    return _round_trips(meter, n_workers=8, per_frame=1, n=100)


def router_256_workers(meter: Meter) -> float:
    """The same with 256 workers, 64 requests in a client's frame, which go to 64 workers."""
    return _round_trips(meter, n_workers=256, per_frame=BATCH, n=256)


def router_version_rule(meter: Meter) -> float:
    """The same with 256 workers for requests that say how stale their weights may be."""
    return _round_trips(meter, n_workers=256, per_frame=BATCH, n=256, place=BOUNDED)


def router_heartbeat(meter: Meter) -> float:
    """Work of the router for a heartbeat of a worker that runs 32 requests."""
    fleet = RoutedFleet(n_workers=64)
    fleet.keep_open(N_OPEN)
    fleet.heartbeats()
    fleet.meter = meter
    fleet.heartbeats()
    return meter.total / 64


def router_tick(meter: Meter) -> float:
    """Work of the router each 50 ms, 64 workers, 2,048 requests in flight, 1,024 idle sessions."""
    fleet = RoutedFleet(n_workers=64)
    fleet.keep_open(N_OPEN)
    fleet.open_sessions(N_SESSIONS)
    fleet.meter = meter
    for _ in range(20):
        fleet.tick()
    return meter.total / 20


def codec(meter: Meter) -> float:
    """Work of the codec for a request and its result: bodies, and frames of one entry each."""
    n = 100
    for index in range(n):
        place = ("generate", f"c/{index}", NO_ATTEMPT, "", "", DEADLINE_MS, PLACE)
        asked = meter.run(_crossed, Entry(*place, meter.run(pack, GENERATE)))
        assert meter.run(unpack, asked) == GENERATE
        ending = Entry("finished", asked.rid, (1, 1), "e", "c", 0, None, meter.run(pack, RESULT))
        ended = meter.run(_crossed, ending)
        assert meter.run(unpack_result, "generate", ended) == RESULT
    return meter.total / n


def client(meter: Meter) -> float:
    """Work of the client for a rollout of 8 tokens, each streamed, 64 at once."""
    bench = _warm_bench()
    bench.client_meter = meter
    bench.rollouts(BATCH)
    return meter.total / BATCH


def worker(meter: Meter) -> float:
    """Work of the worker for the same."""
    bench = _warm_bench()
    bench.worker_meter = meter
    bench.rollouts(BATCH)
    return meter.total / BATCH


PATHS: dict[str, Callable[[Meter], float]] = {
    each.__name__: each
    for each in (
        *(router_batched, router_single, router_256_workers, router_version_rule),
        *(router_heartbeat, router_tick, codec, client, worker),
    )
}


def _round_trips(
    meter: Meter, *, n_workers: int, per_frame: int, n: int, place: Placement = PLACE
) -> float:
    fleet = RoutedFleet(n_workers, place=place)
    fleet.round_trips(per_frame, per_frame)
    fleet.meter = meter
    fleet.round_trips(n, per_frame)
    return meter.total / n


def _warm_bench() -> StreamedRollouts:
    bench = StreamedRollouts()
    bench.rollouts(BATCH)
    return bench


def _crossed(entry: Entry) -> Entry:
    return decode_batch(encode_batch([entry]))[0]


def sizes() -> Counts:
    """Bytes of memory in the router, and of a frame."""
    fleet = RoutedFleet(n_workers=64)
    fleet.round_trips(BATCH)
    fleet.open_sessions(64)
    in_flight = held_bytes(lambda: fleet.keep_open(N_OPEN)) / N_OPEN
    idle = held_bytes(lambda: fleet.open_sessions(N_SESSIONS)) / N_SESSIONS
    return {
        "router_memory/request_in_flight": round(in_flight, 1),
        "router_memory/idle_session": round(idle, 1),
        "frame_of_64/wire_bytes": len(encode_batch(_generates())),
    }


def _generates() -> list[Entry]:
    return [
        Entry("generate", f"c/{index}", NO_ATTEMPT, "", "", DEADLINE_MS, PLACE, BODY)
        for index in range(BATCH)
    ]


def counts() -> Counts:
    """Everything that is compared."""
    found: Counts = {}
    for name, path in PATHS.items():
        found[f"{name}/bytecodes"] = round(path(Bytecodes()), 1)
        found[f"{name}/c_calls"] = round(path(CCalls()), 2)
    return {**found, **sizes()}


def complaints(found: Counts, baseline: Counts) -> list[str]:
    """A sentence for each count that is above the baseline by more than the margin.

    What only one of the two has is named as well: nothing goes unwatched in silence.
    """
    told = [f"{name} has no baseline" for name in found if name not in baseline]
    told += [f"{name} is in the baseline but is not counted" for name in baseline.keys() - found]
    for name in found.keys() & baseline.keys():
        now, before = found[name], baseline[name]
        if now > before * (1 + MARGIN):
            told.append(f"{name} was {before:,} and is {now:,} ({now / before - 1:+.0%})")
    return sorted(told)


def read_baseline() -> Counts | None:
    """What is committed for this version of CPython; None if nothing is."""
    return _read_baselines().get(PYTHON)


def write_baseline(found: Counts) -> None:
    """Replace what is committed for this version of CPython."""
    known = {**_read_baselines(), PYTHON: found}
    BASELINE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _read_baselines() -> dict[str, Counts]:
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def table(found: Counts, baseline: Counts) -> str:
    """A line for each count."""
    lines = [f"{'':34}{'now':>12}{'baseline':>12}"]
    for name, n in found.items():
        before = baseline.get(name)
        known = f"{before:12,}{n / before - 1:+8.1%}" if before else f"{'none':>12}"
        lines.append(f"{name:34}{n:12,}{known}")
    return "\n".join(lines)


def main() -> None:
    """Count; compare, or write."""
    parser = argparse.ArgumentParser(description="Work of the hot paths, counted")
    parser.add_argument("--json", action="store_true", help="only one JSON object: the counts")
    parser.add_argument("--write", action="store_true", help="make these the baseline")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != SEED:
        command = [sys.executable, "-m", "benchmarks.work_counts", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": SEED})  # noqa: S606
    found = counts()
    if options.json:
        print(json.dumps(found))
        return
    baseline = read_baseline()
    print(table(found, baseline or {}))
    if options.write:
        write_baseline(found)
    elif baseline is None:
        sys.exit(f"nothing is committed for CPython {PYTHON}: `make baseline` with it does that")
    elif told := complaints(found, baseline):
        sys.exit("\n".join(["more work than the baseline says:", *told]))


if __name__ == "__main__":
    main()
