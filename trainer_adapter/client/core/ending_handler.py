"""What an ending or a loss means for its request: it ends, or it is sent again.

Every ending that a worker made is acknowledged, whatever it means here.
"""

from dataclasses import replace

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, Row
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Lost, Problem
from rolloutbus.bus.wire.messages.generation import Generated
from rolloutbus.trainer_adapter.client.core.effects import Deliver
from rolloutbus.trainer_adapter.client.core.endings import (
    cancelled,
    error_of,
    floats,
    generated_of,
    ints,
    is_intact,
    problem_of,
    result_of,
    rollout_of,
    row_of,
)
from rolloutbus.trainer_adapter.client.core.request_book import ClientContext, RequestBook
from rolloutbus.trainer_adapter.client.core.requests import OpenRequest
from rolloutbus.trainer_adapter.client.core.results import NO_LOGPROBS, NO_TOKENS, Delta, Rollout

ENGINE_CRASHED = "engine_crashed"


_CORRUPT = Problem(
    code="digest_mismatch",
    message="The result's tokens are not those that its digest was made of.",
    outcome="failed",
)


def delta_of(request: OpenRequest, row: Row) -> Delta:
    """A row of one version as its reader sees it."""
    return Delta(
        rid=request.rid,
        start=row.start,
        tokens=ints(row.tokens),
        logprobs=floats(row.logprobs),
        version=row.versions[0][0],
        worker=request.worker,
    )


def _require_asked_for(request: OpenRequest, generated: Generated) -> None:
    """A result has no more tokens than were asked for.

    Raises:
        RemoteProtocolError: it has.
    """
    n_tokens = len(generated.tokens) // TOKEN_BYTES
    if n_tokens > request.max_tokens:
        raise RemoteProtocolError(
            f"{request.rid}: {n_tokens} tokens came for max_new_tokens {request.max_tokens}"
        )


class EndingHandler:
    """Judges endings and losses."""

    def __init__(self, desk: ClientContext, book: RequestBook) -> None:
        self._counters = desk.counters
        self._max_crashes = desk.settings.max_crashes
        self._out = desk.out
        self._book = book

    def ended(self, entry: Entry, now: float) -> None:
        """An ending came: the first one of an attempt that counts wins."""
        if self._book.released and entry.rid in self._book.released:
            return  # whoever attaches to it later is to have it
        if entry.route:
            self._book.acks.add(entry.route, entry.rid, entry.attempt)
        request = self._book.open.get(entry.rid)
        if request is None or entry.attempt in request.dead_attempts:
            self._counters.stale_endings += 1
            if request is not None:
                self._book.doubt(request, now)
            return
        if entry.attempt != NO_ATTEMPT:
            request.saw(entry.attempt, entry.route)
        try:
            if request.is_generate:
                self._generate_ended(request, entry, now)
            else:
                self._book.end(request, result_of(request, entry), now)
        except RemoteProtocolError as error:
            self._counters.malformed_in += 1
            self._book.end(request, error, now)

    def lost(self, body: Lost, now: float) -> None:
        """Executions are gone with their worker: resume, retry or give up."""
        for rid, attempt in body.items:
            request = self._book.open.get(rid)
            if request is None:
                continue
            if attempt in request.dead_attempts:
                # Its router had taken it up again, in the place of what was sent since.
                self._book.doubt(request, now)
                continue
            self._counters.lost += 1
            if not request.bury(attempt):
                continue
            if body.reason == ENGINE_CRASHED:
                request.n_crashes += 1
                request.owes_retry = True
            self._judge_loss(request, body, now)

    def _judge_loss(self, request: OpenRequest, body: Lost, now: float) -> None:
        if request.abort_since is not None:
            self._book.end(request, cancelled(request, None), now)
        elif request.n_crashes >= self._max_crashes:
            self._book.end(request, _crashed_too_often(request), now)
        elif request.ask.on_loss == "fail" or not request.is_generate:
            error = PeerLost(f"worker {body.worker} was lost ({body.reason}) while it ran")
            self._book.end(request, error, now)
            if request.ask.kind == "generate" and request.ask.is_detached:
                # Its caller wants no other execution; who attached may yet come back for it.
                self._book.acks.over(request.rid, now)
        else:
            self._book.go_on(request, now)

    def _generate_ended(self, request: OpenRequest, entry: Entry, now: float) -> None:
        match entry.kind:
            case "finished":
                self._finished(request, entry, now)
            case "cancelled":
                self._cancelled(request, generated_of(entry), entry, now)
            case "refused":
                self._refused(request, entry, now)
            case _:
                self._book.end(request, error_of(entry.kind, problem_of(entry), entry.rid), now)

    def _finished(self, request: OpenRequest, entry: Entry, now: float) -> None:
        generated = generated_of(entry)
        if generated is None:
            raise RemoteProtocolError("finished: a generate must bring its tokens")
        _require_asked_for(request, generated)
        if not is_intact(generated):
            self._counters.digest_mismatches += 1
            self._book.end(request, EngineFailed(_CORRUPT, rid=request.rid), now)
            return
        self._count_tokens(generated)
        if request.is_streamed:
            self._hold(request, generated)
            self._deliver_last(request, rollout_of(request, generated, entry.route))
        elif not request.assembly.agrees_with(generated.tokens):
            self._counters.stream_mismatches += 1
        self._book.end(request, rollout_of(request, generated, entry.route), now)

    def _cancelled(
        self, request: OpenRequest, generated: Generated | None, entry: Entry, now: float
    ) -> None:
        if generated is not None:
            _require_asked_for(request, generated)
        if generated is not None and not is_intact(generated):
            self._counters.digest_mismatches += 1
            generated = None
        was_wanted = request.abort_since is not None or request.ask.on_loss == "fail"
        if was_wanted or generated is None:
            if generated is not None:
                self._count_tokens(generated)
            self._book.end(request, cancelled(request, generated), now)
            return
        # Not ours: a pause or a weight update stopped it, so it goes on elsewhere or later.
        request.bury(entry.attempt)
        self._hold(request, generated)
        if request.is_streamed:
            self._out.extend(
                Deliver(request.rid, delta_of(request, row)) for row in request.assembly.read()
            )
        self._book.go_on(request, now)

    def _count_tokens(self, generated: Generated) -> None:
        self._counters.prompt_tokens += generated.n_prompt_tokens
        self._counters.tokens += len(generated.tokens) // TOKEN_BYTES

    def _refused(self, request: OpenRequest, entry: Entry, now: float) -> None:
        problem = problem_of(entry)
        # Work that was begun is not given up because the router is full now.
        waits_busy = request.ask.retries_busy or request.n_attempts > 0
        # Time heals these: the request is sent again until its deadline.
        is_passing = problem.code == "not_ready" or (problem.code == "busy" and waits_busy)
        if not is_passing:
            self._book.end(request, error_of("refused", problem, entry.rid), now)
        elif request.abort_since is not None:
            self._book.end(request, cancelled(request, None), now)
        else:
            request.bury(entry.attempt)
            self._book.defer(request, problem, now)

    def _hold(self, request: OpenRequest, generated: Generated) -> None:
        """Replaces the streamed tokens by the result's tokens; counts a mismatch."""
        assembly = request.assembly
        if not assembly.replace(row_of(generated)):
            self._counters.stream_mismatches += 1

    def _deliver_last(self, request: OpenRequest, rollout: Rollout) -> None:
        deltas = [delta_of(request, row) for row in request.assembly.read()]
        if not deltas:
            version = rollout.version_runs[-1][0] if rollout.version_runs else 0
            end = request.assembly.n_tokens
            deltas.append(
                Delta(request.rid, end, NO_TOKENS, NO_LOGPROBS, version, worker=rollout.worker)
            )
        deltas[-1] = replace(deltas[-1], finish_reason=rollout.finish_reason, rollout=rollout)
        self._out.extend(Deliver(request.rid, delta) for delta in deltas)


def _crashed_too_often(request: OpenRequest) -> EngineFailed:
    message = f"The engine crashed {request.n_crashes} times while this request ran."
    return EngineFailed(Problem(ENGINE_CRASHED, message, "failed"), rid=request.rid)
