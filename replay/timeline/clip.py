"""A part of a timeline: what lies between two moments, cut at both. Pure."""

from collections.abc import Iterable

import msgspec

from rolloutbus.replay.timeline.lanes import Execution, Span, Timeline, WorkerLane


def clipped(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """What lies between two seconds; the first of them is second 0 of the result."""
    start_s = min(max(start_s, 0.0), timeline.duration_s)
    end_s = min(max(end_s, start_s), timeline.duration_s)
    first_bin = int(start_s / timeline.bin_s)
    bins = slice(first_bin, int(end_s / timeline.bin_s) + 1)
    # Bins are not cut: the part begins where its first bin does.
    start_s = first_bin * timeline.bin_s
    return Timeline(
        timeline.began_at + start_s,
        end_s - start_s,
        timeline.bin_s,
        [_lane(lane, (start_s, end_s), bins) for lane in timeline.lanes],
        _cut(timeline.updates, start_s, end_s),
        timeline.waiting[bins],
        _cut(timeline.unrecorded, start_s, end_s),
        [*timeline.notes, f"Seconds {start_s:.2f} to {end_s:.2f} of {timeline.duration_s:.2f}."],
    )


def _lane(lane: WorkerLane, between_s: tuple[float, float], bins: slice) -> WorkerLane:
    start_s, end_s = between_s
    kept = [
        _execution(each, start_s, end_s)
        for each in lane.executions
        if each.start_s < end_s and each.end_s > start_s
    ]
    rows = {row: at for at, row in enumerate(sorted({each.row for each in kept}))}
    return msgspec.structs.replace(
        lane,
        n_rows=len(rows),
        versions=_cut(lane.versions, start_s, end_s),
        states=_cut(lane.states, start_s, end_s),
        weights=_cut(lane.weights, start_s, end_s),
        executions=[msgspec.structs.replace(each, row=rows[each.row]) for each in kept],
        tokens_per_s=lane.tokens_per_s[bins],
    )


def _execution(execution: Execution, start_s: float, end_s: float) -> Execution:
    return msgspec.structs.replace(
        execution,
        start_s=max(execution.start_s, start_s) - start_s,
        end_s=min(execution.end_s, end_s) - start_s,
        spans=_cut(execution.spans, start_s, end_s),
    )


def _cut(spans: Iterable[Span], start_s: float, end_s: float) -> list[Span]:
    return [
        msgspec.structs.replace(
            each,
            start_s=max(each.start_s, start_s) - start_s,
            end_s=min(each.end_s, end_s) - start_s,
        )
        for each in spans
        if each.start_s < end_s and each.end_s > start_s
    ]
