"""Executions of a timeline: what came of each request, and in which row of its lane it is drawn.

Pure. Times are seconds since the beginning of the recording.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from rolloutbus.bus.wire.codec import unpack, unpack_as, unpack_result
from rolloutbus.bus.wire.entry import Attempt, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Accepted, Fenced, Lost
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, Generated
from rolloutbus.replay.timeline.lanes import Execution, Highs, LaneSpan, Outcome, Sums

TOKEN_BYTES = 4
Key = tuple[str, Attempt]


class Asked(NamedTuple):
    """A request, as its client asked for it."""

    is_streamed: bool
    n_prompt_tokens: int
    session: str
    group: str


def _asked(entry: Entry) -> Asked:
    body, place = unpack_as(Generate, entry), entry.place or Placement("")
    n_tokens = len(body.prompt) // TOKEN_BYTES
    return Asked(body.stream, n_tokens, place.session, place.group)


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """One attempt at a request, while its story is heard."""

    key: Key
    worker: str
    asked: Asked | None
    waiting_since_s: float = 0.0
    given_s: float | None = None
    """When the router gave it to the worker."""
    accepted_s: float | None = None
    first_row_s: float | None = None
    first_counts: list[int] = field(default_factory=list[int])
    """Tokens of each version in the portion that came first."""
    parts: list[LaneSpan] = field(default_factory=list[LaneSpan])
    """Kind `decode`, one for each run of one version; the first begins with the first row."""
    ended_s: float | None = None
    heard_s: float = 0.0
    """When anything was last heard of it."""
    outcome: Outcome = "open"
    note: str = ""
    run_s: float | None = None
    """From the first token to the end, as the worker says."""
    n_resumed: int = 0
    _portion: tuple[float, int] = (0.0, 0)
    """Beginning of the portion of tokens that came last, and how many are in it so far."""

    def row(self, at_s: float, count: int, version: int) -> None:
        """Tokens came."""
        self.heard_s = max(self.heard_s, at_s)
        if not count:
            return
        if self.first_row_s is None:
            self.first_row_s, self.first_counts = at_s, [count]
            self._portion = at_s, count
            self.parts.append(LaneSpan("decode", at_s, at_s, version, count))
            return
        last = self.parts[-1]
        began_s, n_before = self._portion
        if at_s > last.end_s:
            began_s, n_before = last.end_s, 0
        self._portion = began_s, n_before + count
        is_first = at_s == self.first_row_s
        if is_first and last.version == version:
            self.first_counts[-1] += count
        elif is_first:
            self.first_counts.append(count)
        if last.version == version:
            self.parts[-1] = LaneSpan("decode", last.start_s, at_s, version, last.n_tokens + count)
            return
        start_s = last.end_s
        if n_before:  # one portion, two versions: only the number of tokens tells where they meet
            start_s = began_s + (at_s - began_s) * n_before / (n_before + count)
            self.parts[-1] = LaneSpan("decode", last.start_s, start_s, last.version, last.n_tokens)
        self.parts.append(LaneSpan("decode", start_s, at_s, version, count))

    def end(self, at_s: float, outcome: Outcome, note: str) -> None:
        """It is over; the first word counts."""
        if self.ended_s is None:
            self.ended_s, self.outcome, self.note = at_s, outcome, note


class RequestStories:
    """Follows every execution that a recording speaks of."""

    def __init__(self) -> None:
        self.running: dict[Key, RunningAttempt] = {}
        """Ended ones too: a last row may be heard after the ending."""
        self.before: list[RunningAttempt] = []
        """Those that were heard of before the recording was interrupted."""
        self.tokens: dict[str, Sums] = {}
        """By worker."""
        self.waiting = Highs()
        self._asked: dict[str, Asked] = {}
        self._waiting: dict[str, float] = {}
        self._open: dict[str, set[Key]] = {}
        """By request: executions of which no end was heard."""
        self._over: set[str] = set()
        """Requests that have their ending."""

    def asked(self, entry: Entry, at_s: float) -> None:
        """A client sent a `generate`, perhaps again."""
        if entry.rid not in self._asked:
            self._asked[entry.rid] = _asked(entry)
        elif entry.rid in self._waiting or entry.rid in self._over or self._open.get(entry.rid):
            return
        self._waiting[entry.rid] = at_s
        self.waiting.note(at_s, len(self._waiting))

    def given(self, worker: str, entry: Entry, at_s: float) -> None:
        """The router sent a `generate` to a worker, perhaps again."""
        since_s = self._waits_no_more(entry.rid, at_s)
        key = entry.rid, entry.attempt
        running = self._at(key, worker, at_s)
        if running.given_s is None:
            running.given_s = at_s
            running.asked = self._asked.get(entry.rid)  # rows may be heard before
            running.waiting_since_s = at_s if since_s is None else since_s
            running.n_resumed = _n_prefix(entry)
            for older in self._open.get(entry.rid, set()) - {key}:
                self._end(older, at_s, "lost", "it was given away again")

    def accepted(self, worker: str, entry: Entry, at_s: float) -> None:
        """A worker says that it has begun."""
        for rid, attempt in unpack_as(Accepted, entry).items:
            running = self.running.get((rid, attempt))
            if running is not None and running.worker == worker and running.accepted_s is None:
                running.accepted_s = at_s
                running.heard_s = max(running.heard_s, at_s)

    def published(self, entry: Entry, at_s: float) -> None:
        """A worker published rows."""
        deltas = unpack_as(Deltas, entry)
        tokens = self.tokens.setdefault(entry.route, Sums())
        tokens.add(at_s, sum(deltas.counts))
        for row, rid in enumerate(deltas.rids):
            running = self._at((rid, deltas.attempts[row]), entry.route, at_s)
            running.row(at_s, deltas.counts[row], deltas.versions[row])
        for row, reason in deltas.finishes:
            key = deltas.rids[row], deltas.attempts[row]
            outcome: Outcome = "cancelled" if reason == "abort" else "finished"
            self._end(key, at_s, outcome, reason)

    def ended(self, entry: Entry, at_s: float) -> None:
        """A worker, or the router by itself, says how a request ended."""
        key = entry.rid, entry.attempt
        self._waits_no_more(entry.rid, at_s)
        self._over.add(entry.rid)
        running = self.running.get(key)
        if running is None:
            return
        running.heard_s = max(running.heard_s, at_s)
        if entry.kind in ("finished", "cancelled"):
            result = cast("Generated", unpack_result("generate", entry))
            running.run_s = result.run_ms / 1000
            running.n_resumed = result.n_resumed
        self._end(key, at_s, cast("Outcome", entry.kind), "")
        running.outcome = cast("Outcome", entry.kind)  # a row may have told of the end, not of this

    def taken_away(self, entry: Entry, at_s: float) -> None:
        """The router says `lost`: gone with their worker, or `fenced`: its executions no more."""
        body = cast("Lost | Fenced", unpack(entry))
        for rid, attempt in body.items:
            self._end((rid, attempt), at_s, cast("Outcome", entry.kind), body.reason)

    def interrupt(self, at_s: float) -> None:
        """Nothing was heard for a while: what happened meanwhile is not known."""
        for keys in self._open.values():
            for key in keys:
                self.running[key].end(at_s, "open", "the recording was interrupted")
        self.before += self.running.values()
        self.running.clear()
        self._open.clear()
        self._waiting.clear()
        self.waiting.note(at_s, 0)

    def _at(self, key: Key, worker: str, at_s: float) -> RunningAttempt:
        running = self.running.get(key)
        if running is None:
            running = self.running[key] = RunningAttempt(key, worker, self._asked.get(key[0]))
            running.heard_s = at_s
            self._open.setdefault(key[0], set()).add(key)
        return running

    def _end(self, key: Key, at_s: float, outcome: Outcome, note: str) -> None:
        running = self.running.get(key)
        if running is not None:
            running.end(at_s, outcome, note)
            self._open.get(key[0], set()).discard(key)

    def _waits_no_more(self, rid: str, at_s: float) -> float | None:
        """Ends the request's wait at the router; returns when it began, None if it did not wait."""
        since_s = self._waiting.pop(rid, None)
        if since_s is not None:
            self.waiting.note(at_s, len(self._waiting))
        return since_s


def _n_prefix(entry: Entry) -> int:
    prefix = unpack_as(Generate, entry).prefix
    return len(prefix.tokens) // TOKEN_BYTES if prefix else 0


def executions_of(book: RequestStories, end_s: float) -> dict[str, list[Execution]]:
    """By worker, in order of their starts; what is still under way lasts until `end_s`."""
    by_worker: dict[str, list[tuple[float, float, RunningAttempt]]] = {}
    for running in [*book.before, *book.running.values()]:
        start_s, stop_s = _extent(running, end_s)
        by_worker.setdefault(running.worker, []).append((start_s, stop_s, running))
    return {worker: _in_rows(found) for worker, found in by_worker.items()}


def spans_in_order(spans: Iterable[LaneSpan]) -> list[LaneSpan]:
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


def _spans(running: RunningAttempt, stop_s: float) -> list[LaneSpan]:
    """Prefill, decode by version, and how long it was not known that all was lost."""
    spans = [*_before_decode(running, stop_s), *_decode(running)]
    if running.outcome == "lost":
        last_s = spans[-1].end_s if spans else running.heard_s
        spans.append(LaneSpan("lost", last_s, stop_s, note=running.note))
    return [each for each in spans if each.end_s > each.start_s or each.n_tokens]


def _before_decode(running: RunningAttempt, stop_s: float) -> list[LaneSpan]:
    begin_s = _begin_s(running)
    if begin_s is None:  # only the stream was heard
        return []
    if running.first_row_s is None:
        if running.outcome == "finished":
            return [LaneSpan("unsplit", begin_s, stop_s, note="none of its tokens was recorded")]
        until_s = running.heard_s if running.outcome == "lost" else stop_s
        return [LaneSpan("prefill", begin_s, max(begin_s, until_s))]
    first_s = _first_token_s(running)
    if first_s is None:
        n_first = sum(running.first_counts)
        note = f"{n_first} tokens came at once: when the first of them did is not recorded"
        return [LaneSpan("unsplit", begin_s, max(begin_s, running.first_row_s), note=note)]
    return [LaneSpan("prefill", min(begin_s, first_s), first_s)]


def _begin_s(running: RunningAttempt) -> float | None:
    """When its worker took it up, or was given it: streams and tap may overtake one another."""
    accepted_s, first_s = running.accepted_s, running.first_row_s
    if accepted_s is not None and (first_s is None or accepted_s <= first_s):
        return accepted_s
    return running.given_s


def _first_token_s(running: RunningAttempt) -> float | None:
    """When the first token was sampled; None if nothing tells.

    A request without a stream is published in larger portions: the end of such a rollout, less the
    time that its worker says it took, tells.
    """
    if running.first_row_s is None or sum(running.first_counts) == 1:
        return running.first_row_s
    if running.asked is not None and running.asked.is_streamed:
        return running.first_row_s
    begin_s = _begin_s(running)
    if running.run_s is None or running.ended_s is None or begin_s is None:
        return None
    return min(max(begin_s, running.ended_s - running.run_s), running.first_row_s)


def _decode(running: RunningAttempt) -> list[LaneSpan]:
    """What came first is spread over the time since the first token, if that is known."""
    first_s, shown_s = _first_token_s(running), running.first_row_s
    if first_s is None or shown_s is None or first_s == shown_s:
        return running.parts
    spread: list[LaneSpan] = []
    s_per_token = (shown_s - first_s) / sum(running.first_counts)
    at_s = first_s
    for part, count in zip(running.parts, running.first_counts, strict=False):
        start_s, at_s = at_s, at_s + count * s_per_token
        spread.append(msgspec.structs.replace(part, start_s=start_s, end_s=at_s))
    # The last of them may have gone on after the first portion.
    last_s = running.parts[len(spread) - 1].end_s
    spread[-1] = msgspec.structs.replace(spread[-1], end_s=last_s)
    return [*spread, *running.parts[len(spread) :]]
