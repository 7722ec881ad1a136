"""A timeline for a browser: an HTML page that needs no network, and a Chrome trace for Perfetto.

Of the trace (ui.perfetto.dev, chrome://tracing): one process per worker, one thread per lane; times
are microseconds. Source: "Trace Event Format" of the Chromium project.
"""

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

import msgspec

from rolloutbus.bus.drawing.colours import VERSIONS, lanes_script
from rolloutbus.replay.timeline.lanes import NO_VERSION, Execution, LaneSpan, Timeline, WorkerLane
from rolloutbus.replay.timeline.picture import FILLS

FLEET_PID = 1
VERSIONS_TID, STATES_TID, WEIGHTS_TID, STALLS_TID, FIRST_ROW_TID = 1, 2, 3, 4, 10
US = 1_000_000

Event = dict[str, Any]


def trace_of(timeline: Timeline) -> bytes:
    """JSON, as a file for Perfetto."""
    events: list[Event] = [_named("process_name", "fleet", FLEET_PID)]
    events += _spans(timeline.updates, FLEET_PID, 1, "updates")
    events += _spans(timeline.unrecorded, FLEET_PID, 2, "recording")
    events += _spans(timeline.moves, FLEET_PID, 3, "session moves")
    events += _counter("waiting at the router", timeline.waiting, FLEET_PID, timeline.bin_s)
    for pid, lane in enumerate(timeline.lanes, FLEET_PID + 1):
        events += _lane(lane, pid, timeline.bin_s)
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "metadata": {"began_at": timeline.began_at, "notes": timeline.notes},
    }
    return msgspec.json.encode(whole)


def _lane(lane: WorkerLane, pid: int, bin_s: float) -> Iterator[Event]:
    yield _named("process_name", lane.name, pid)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield from _spans(lane.versions, pid, VERSIONS_TID, "version")
    yield from _spans(lane.states, pid, STATES_TID, "state")
    # What may overlap has a thread of its own: slices of one thread have to be nested.
    commits = [each for each in lane.weights if each.kind != "stall"]
    yield from _spans(commits, pid, WEIGHTS_TID, "weights")
    stalls = [each for each in lane.weights if each.kind == "stall"]
    yield from _spans(stalls, pid, STALLS_TID, "stalls")
    yield from _counter("tokens per second", lane.tokens_per_s, pid, bin_s)
    for row in range(lane.n_rows):
        yield _named("thread_name", f"requests {row:03}", pid, FIRST_ROW_TID + row)
    for execution in lane.executions:
        yield from _execution(execution, pid)


def _execution(execution: Execution, pid: int) -> Iterator[Event]:
    tid = FIRST_ROW_TID + execution.row
    told = msgspec.to_builtins(execution)
    facts = {name: value for name, value in told.items() if name not in _DRAWN}
    yield _slice(execution.rid, (execution.start_s, execution.end_s), pid, tid, facts)
    for span in execution.spans:
        yield _of_span(span, pid, tid)


_DRAWN = {"rid", "row", "start_s", "end_s", "spans"}


def _spans(spans: Iterable[LaneSpan], pid: int, tid: int, name: str) -> Iterator[Event]:
    found = [_of_span(span, pid, tid) for span in spans]
    if found:
        yield _named("thread_name", name, pid, tid)
    yield from found


def _of_span(span: LaneSpan, pid: int, tid: int) -> Event:
    facts: dict[str, Any] = {}
    if span.version != NO_VERSION:
        facts["version"] = span.version
    if span.n_tokens:
        facts["n_tokens"] = span.n_tokens
    if span.note:
        facts["note"] = span.note
    name = span.kind if span.version == NO_VERSION else f"{span.kind} v{span.version}"
    name = name.removeprefix("version ")
    return _slice(name, (span.start_s, span.end_s), pid, tid, facts)


def _slice(
    name: str, between_s: tuple[float, float], pid: int, tid: int, facts: dict[str, Any]
) -> Event:
    start_s, end_s = between_s
    # Rounded ends, so that what touches does not overlap by rounding.
    start_us, end_us = round(start_s * US), round(end_s * US)
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": facts,
    }


def _counter(name: str, values: Iterable[float], pid: int, bin_s: float) -> Iterator[Event]:
    before: float | None = None
    for at, value in enumerate(values):
        if value != before:
            ts = round(at * bin_s * US)
            yield {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": {"value": value}}
        before = value


def _named(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


_TEMPLATE = "page.html"
_PLACE = "/*DATA*/"
_LANES = "/*LANES*/"


def page_of(timeline: Timeline) -> str:
    """The whole file."""
    content = msgspec.json.encode(
        {"timeline": timeline, "colours": {"versions": VERSIONS, **FILLS}}
    ).decode()
    # Names come from peers: none of them may end the element that they are in.
    safe = content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = files(__package__ or "replay").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    template = template.replace(_LANES, lanes_script())
    before, _, after = template.partition(_PLACE)
    return before + safe + after
