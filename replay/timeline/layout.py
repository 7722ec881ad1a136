"""Where things go on a timeline: executions side by side in rows, each cut into its spans.

Pure. Times are seconds since the beginning of the recording.
"""

import heapq
from collections.abc import Iterable

import msgspec

from rolloutbus.replay.timeline.lanes import Execution, Span
from rolloutbus.replay.timeline.requests import RequestStories, RunningAttempt


def executions_of(book: RequestStories, end_s: float) -> dict[str, list[Execution]]:
    """By worker, in order of their starts; what is still under way lasts until `end_s`."""
    by_worker: dict[str, list[tuple[float, float, RunningAttempt]]] = {}
    for running in [*book.before, *book.running.values()]:
        start_s, stop_s = _extent(running, end_s)
        by_worker.setdefault(running.worker, []).append((start_s, stop_s, running))
    return {worker: _in_rows(found) for worker, found in by_worker.items()}


def spans_in_order(spans: Iterable[Span]) -> list[Span]:
    """By their starts, the longer of two first: what comes later lies on top."""
    return sorted(spans, key=lambda each: (each.start_s, -each.end_s))


def _in_rows(found: list[tuple[float, float, RunningAttempt]]) -> list[Execution]:
    """The lowest row that is free, for one after the other."""
    found.sort(key=lambda each: (each[0], each[2].key))
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    placed: list[Execution] = []
    for start_s, stop_s, running in found:
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stop_s, row))
        placed.append(_execution(running, row, start_s, stop_s))
    return placed


def _extent(running: RunningAttempt, end_s: float) -> tuple[float, float]:
    firsts = (running.given_s, running.accepted_s, running.first_row_s, running.heard_s)
    start_s = min(each for each in firsts if each is not None)
    last_s = max(running.heard_s, running.parts[-1].end_s if running.parts else start_s)
    if running.ended_s is not None:
        return start_s, max(last_s, running.ended_s)
    return start_s, max(last_s, end_s) if running.given_s is not None else last_s


def _execution(running: RunningAttempt, row: int, start_s: float, stop_s: float) -> Execution:
    asked = running.asked
    waited_s = 0.0 if running.given_s is None else running.given_s - running.waiting_since_s
    return Execution(
        *running.key,
        row,
        start_s,
        stop_s,
        running.outcome,
        _spans(running, stop_s),
        sum(each.n_tokens for each in running.parts),
        asked.n_prompt_tokens if asked else 0,
        running.n_resumed,
        round(waited_s, 6),
        asked.session if asked else "",
        asked.group if asked else "",
        running.note,
    )


def _spans(running: RunningAttempt, stop_s: float) -> list[Span]:
    """Prefill, decode by version, and how long it was not known that all was lost."""
    spans = [*_before_decode(running, stop_s), *_decode(running)]
    if running.outcome == "lost":
        last_s = spans[-1].end_s if spans else running.heard_s
        spans.append(Span("lost", last_s, stop_s, note=running.note))
    return [each for each in spans if each.end_s > each.start_s or each.n_tokens]


def _before_decode(running: RunningAttempt, stop_s: float) -> list[Span]:
    begin_s = _begin_s(running)
    if begin_s is None:  # only the stream was heard
        return []
    if running.first_row_s is None:
        if running.outcome == "finished":
            return [Span("unsplit", begin_s, stop_s, note="none of its tokens was recorded")]
        until_s = running.heard_s if running.outcome == "lost" else stop_s
        return [Span("prefill", begin_s, max(begin_s, until_s))]
    first_s = _first_token_s(running)
    if first_s is None:
        n_first = sum(running.first_counts)
        note = f"{n_first} tokens came at once: when the first of them did is not recorded"
        return [Span("unsplit", begin_s, max(begin_s, running.first_row_s), note=note)]
    return [Span("prefill", min(begin_s, first_s), first_s)]


def _begin_s(running: RunningAttempt) -> float | None:
    """When its worker took it up, or was given it: streams and tap may overtake one another."""
    accepted_s, first_s = running.accepted_s, running.first_row_s
    if accepted_s is not None and (first_s is None or accepted_s <= first_s):
        return accepted_s
    return running.given_s


def _first_token_s(running: RunningAttempt) -> float | None:
    """When the first token was sampled; None if nothing tells.

    What nobody streams is published in larger portions: the end of such a rollout, less the time
    that its worker says it took, tells.
    """
    if running.first_row_s is None or sum(running.first_counts) == 1:
        return running.first_row_s
    if running.asked is not None and running.asked.is_streamed:
        return running.first_row_s
    begin_s = _begin_s(running)
    if running.run_s is None or running.ended_s is None or begin_s is None:
        return None
    return min(max(begin_s, running.ended_s - running.run_s), running.first_row_s)


def _decode(running: RunningAttempt) -> list[Span]:
    """What came first is spread over the time since the first token, if that is known."""
    first_s, shown_s = _first_token_s(running), running.first_row_s
    if first_s is None or shown_s is None or first_s == shown_s:
        return running.parts
    spread: list[Span] = []
    s_per_token = (shown_s - first_s) / sum(running.first_counts)
    at_s = first_s
    for part, count in zip(running.parts, running.first_counts, strict=False):
        start_s, at_s = at_s, at_s + count * s_per_token
        spread.append(msgspec.structs.replace(part, start_s=start_s, end_s=at_s))
    # The last of them may have gone on after the first portion.
    last_s = running.parts[len(spread) - 1].end_s
    spread[-1] = msgspec.structs.replace(spread[-1], end_s=last_s)
    return [*spread, *running.parts[len(spread) :]]
