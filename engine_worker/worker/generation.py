"""The running `generate` requests of one worker: started, fed by engine steps, ended."""

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.durations import DurationCounter
from rolloutbus.bus.wire.entry import Attempt, AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Abort, Deltas, FinishReason, Generate
from rolloutbus.bus.wire.messages.host import EngineReady, Extras
from rolloutbus.bus.wire.validation import check_cost, check_generate
from rolloutbus.bus.wire.versions import parse_versions
from rolloutbus.engine_worker.features import NOTHING_LOST, missing, unknown_adapter
from rolloutbus.engine_worker.worker.effects import ToHost
from rolloutbus.engine_worker.worker.requests import ITEM_BYTES, NEVER, RunningRequest
from rolloutbus.engine_worker.worker.streams import StreamBatcher

MIN_STALE = 1024
"""Below this many deadlines of ended requests, sweeping them is not worth it."""


class Limits(NamedTuple):
    """What the engine can take."""

    vocab_size: int
    max_context: int
    max_running: int
    """More than the router should ever place here."""
    features: frozenset[str] = frozenset()
    lost: Mapping[str, str] = NOTHING_LOST


def limits_of(engine: EngineReady) -> Limits:
    """The limits of an engine, from its `engine_ready`."""
    max_running = 4 * engine.slots + 16
    features = frozenset(engine.features)
    return Limits(engine.vocab_size, engine.max_context, max_running, features, engine.lost)


class FinishedRequest(NamedTuple):
    """A request that has its last token."""

    request: RunningRequest
    reason: FinishReason


class Unmeasured(NamedTuple):
    """A request that fails because its tokens came without required columns; with the reason."""

    request: RunningRequest
    problem: Problem


class Measured:
    """Tells which tokens of a step have their logprobs; NaN stands for one not measured."""

    def __init__(self, deltas: Deltas) -> None:
        self._n_bytes = len(deltas.tokens)
        self._logprobs = _places_of_nan(deltas.logprobs)
        self._behaviour = _places_of_nan(deltas.behaviour_logprobs)
        self._has_behaviour = len(deltas.behaviour_logprobs) == self._n_bytes
        self._has_logprobs = len(deltas.logprobs) == self._n_bytes

    def lacking(self, start: int, stop: int, *, truncates: bool) -> Problem | None:
        """Why the row with these bytes cannot be used; None if it can."""
        if start == stop:
            return None
        part = slice(start // ITEM_BYTES, stop // ITEM_BYTES)
        if not self._has_logprobs or (self._logprobs is not None and self._logprobs[part].any()):
            return _NO_LOGPROBS
        if truncates and (
            not self._has_behaviour or (self._behaviour is not None and self._behaviour[part].any())
        ):
            return _NO_BEHAVIOUR
        return None


def _places_of_nan(column: bytes) -> "np.ndarray[tuple[int], np.dtype[np.bool_]] | None":
    """Of a float32 column: bool [n]; None: it has no NaN."""
    places = np.isnan(np.frombuffer(column, "<f4"))
    return places if places.any() else None


_NO_LOGPROBS = Problem(
    "engine_failed", "The engine has reported tokens without their logprobs.", "failed"
)
_NO_BEHAVIOUR = Problem(
    "engine_failed",
    "The engine has not measured what truncation left of the distribution: logprobs before it "
    "are none of the policy that sampled. Ask without top_k, top_p and min_p.",
    "failed",
    field="sampling",
)

_NO_ADAPTER = Problem(
    "engine_failed",
    "The engine has reported tokens without the version of the adapter that sampled them.",
    "failed",
    field="lora",
)


class Generation:
    """All running requests, by rid."""

    def __init__(self, streams: StreamBatcher) -> None:
        self._requests: dict[str, RunningRequest] = {}
        self._deadlines: list[tuple[float, str, Attempt]] = []
        self._streams = streams
        self.limits = Limits(0, 0, 0)
        self.adapters: dict[str, int] = {}
        """Versions of the loaded adapters, by name."""
        self.n_sampled = 0
        """Tokens sampled since this process started."""
        self.counters = {"requests": 0, "resumed_requests": 0, "prompt_tokens": 0}
        """Of requests that began, since then."""
        self.first_tokens = DurationCounter()
        """From a request's arrival to its first token."""
        self.next_tokens = DurationCounter()
        """From one token to the next one."""
        self.n_pinned = 0
        """Running requests that must end on the present weights."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, rid: str) -> RunningRequest | None:
        """The running request with this rid."""
        return self._requests.get(rid)

    def all(self) -> Iterable[RunningRequest]:
        """Running requests, oldest first."""
        return self._requests.values()

    def start(self, entry: Entry, version: int, now: float) -> ToHost | Problem:
        """Begin a `generate`, or return why it is refused."""
        try:
            body = unpack(entry)
        except RemoteProtocolError as error:
            return Problem("bad_request", str(error), "not_started", field=_field_of(error))
        assert isinstance(body, Generate)
        limits = self.limits
        problem = (
            _check_version(entry, version)
            or check_generate(body, vocab_size=limits.vocab_size, max_context=limits.max_context)
            or _check_cost(entry, body, limits)
            or missing(body, limits.features, limits.lost)
            or unknown_adapter(body.lora, self.adapters)
        )
        if problem is not None:
            return problem
        if len(self._requests) >= limits.max_running:
            return Problem("not_ready", "This worker is full; it will be retried.", "not_started")
        request = RunningRequest(entry, body, now, limits.vocab_size)
        self._requests[entry.rid] = request
        self.n_pinned += request.is_pinned
        self.counters["requests"] += 1
        self.counters["resumed_requests"] += request.n_prefix > 0
        self.counters["prompt_tokens"] += len(body.prompt) // ITEM_BYTES
        if request.deadline_at != NEVER:
            self._note_deadline(request)
        return ToHost(
            Entry("generate", entry.rid, entry.attempt, place=entry.place, body=entry.body)
        )

    def keep(self, extras: Extras) -> None:
        """Keep what belongs to the result of a request, beside its columns."""
        request = self._at(extras.rid, extras.attempt)
        if request is None:
            return
        if extras.arrays:
            request.arrays = extras.arrays
        if extras.lora:
            request.began_with(extras.lora)

    def step(self, deltas: Deltas, now: float) -> list[FinishedRequest | Unmeasured]:
        """One engine step: append rows, publish them, return what is complete or has to fail."""
        tokens, logprobs = memoryview(deltas.tokens), memoryview(deltas.logprobs)
        behaviour = memoryview(deltas.behaviour_logprobs)
        ended = dict(deltas.finishes)
        measured = Measured(deltas)
        finished: list[FinishedRequest | Unmeasured] = []
        stop = 0
        for row, rid in enumerate(deltas.rids):
            start, stop = stop, stop + deltas.counts[row] * ITEM_BYTES
            request = self._requests.get(rid)
            if request is None or request.key[1] != deltas.attempts[row]:
                continue  # aborted or fenced while this step was on its way
            version = deltas.versions[row]
            part = slice(start, stop)
            lacking = measured.lacking(start, stop, truncates=request.has_behaviour)
            if lacking is None and request.lacks_adapter and stop > start:
                lacking = _NO_ADAPTER
            if lacking:
                finished.append(Unmeasured(request, lacking))
                self._remove(request)
                continue
            n_new = deltas.counts[row]
            if n_new:
                self._measure(request, n_new, now)
            request.add(version, tokens[part], logprobs[part], behaviour[part], now)
            self.n_sampled += n_new
            if row in ended:
                reason = ended[row]
                finished.append(self.end(request, reason, now))
            elif stop > start:
                self._streams.sampled(request, version, now)
        return finished

    def _measure(self, request: RunningRequest, n_new: int, now: float) -> None:
        """Time the tokens of one step; those that come together share the time since the last."""
        if request.sampled_at is None:
            self.first_tokens.add(now - request.arrived_at)
            n_new -= 1
            if n_new:
                self.next_tokens.add(0.0, n_new)
        else:
            self.next_tokens.add((now - request.sampled_at) / n_new, n_new)
        request.sampled_at = now

    def end(self, request: RunningRequest, reason: FinishReason, now: float) -> FinishedRequest:
        """Remove a request, and publish its end on its stream."""
        self._remove(request)
        self._streams.ended(request, reason, now)
        return FinishedRequest(request, reason)

    def expired(self, now: float) -> list[RunningRequest]:
        """Requests whose deadline has passed; still running."""
        found: list[RunningRequest] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rid, attempt = heapq.heappop(self._deadlines)
            request = self._requests.get(rid)
            if request is not None and request.key[1] == attempt:
                found.append(request)
        return found

    def forget(self, keys: Iterable[AttemptKey]) -> list[ToHost]:
        """Drop these without an ending; returns what tells the engine."""
        requests = [request for rid, attempt in keys if (request := self._at(rid, attempt))]
        for request in requests:
            self._remove(request)
        return stop_in_engine(requests)

    def clear(self) -> None:
        """Drop everything: the engine is gone."""
        self._requests.clear()
        self._deadlines.clear()
        self.n_pinned = 0

    def _note_deadline(self, request: RunningRequest) -> None:
        rid, attempt = request.key
        heapq.heappush(self._deadlines, (request.deadline_at, rid, attempt))
        if len(self._deadlines) > MIN_STALE + 2 * len(self._requests):
            running = self._requests.values()
            self._deadlines = [(r.deadline_at, *r.key) for r in running if r.deadline_at != NEVER]
            heapq.heapify(self._deadlines)

    def _at(self, rid: str, attempt: Attempt) -> RunningRequest | None:
        request = self._requests.get(rid)
        return request if request is not None and request.key[1] == attempt else None

    def _remove(self, request: RunningRequest) -> None:
        del self._requests[request.key[0]]
        self.n_pinned -= request.is_pinned


def stop_in_engine(requests: Iterable[RunningRequest]) -> list[ToHost]:
    """Ask the engine host to stop these; what it still reports of them is ignored."""
    rids = [str(request.key[0]) for request in requests]
    return [ToHost(Entry("abort", RequestId(""), body=pack(Abort(rids=rids))))] if rids else []


def _check_cost(entry: Entry, body: Generate, limits: Limits) -> Problem | None:
    if entry.place is None or not entry.place.cost:
        return None  # it did not come from a router
    return check_cost(entry.place, body, max_context=limits.max_context)


def _check_version(entry: Entry, version: int) -> Problem | None:
    if entry.place is None or entry.place.versions == "any":
        return None
    rule = parse_versions(entry.place.versions)
    if isinstance(rule, Problem):
        return rule
    if rule.accepts(version, version):
        return None
    message = f"This worker has version {version}, and {rule} was asked for."
    return Problem("not_ready", message, "not_started", field="place.versions")


def _field_of(error: RemoteProtocolError) -> str:
    """Dotted path from the codec's `... - at `$.sampling.top_p``; empty if it names none."""
    text = str(error)
    at = text.rfind("`$")
    return text[at + 2 :].strip("`. ") if at >= 0 else ""
