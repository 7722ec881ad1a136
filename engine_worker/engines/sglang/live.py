"""The requests that SGLang has now, and how their tokens become steps."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Any

import numpy as np

from rolloutbus.bus.wire.entry import AttemptKey, RequestId
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Array, FinishReason
from rolloutbus.engine_worker.engine import Float32s, Int32s, Step, StepSink, Work, began_with
from rolloutbus.engine_worker.engines.sglang.requests import engine_rid
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import RowFinish, Rows
from rolloutbus.engine_worker.engines.shared.row_rules import (
    BROKEN_ADAPTER,
    BROKEN_WEIGHTS,
    cannot_sample,
)
from rolloutbus.engine_worker.engines.shared.texts import TOO_SLOW

WORDLESS = "a scheduler process of SGLang has ended without a word"
ADVICE = "lower `mem_fraction_static`, `slots` or `max_context`"

_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_MEMORY|ALLOC_FAILED|bad_alloc|MemoryError"
    r"|can't allocate memory|cannot allocate memory|no enough memory|not enough memory",
    re.IGNORECASE,
)


def is_out_of_memory(words: str) -> bool:
    """Whether something, on a GPU or off it, had no room."""
    return _NO_MEMORY.search(words) is not None


def cause_of(last_words: str) -> str:
    """For people: the cause of a scheduler's end, from what it said last."""
    if is_out_of_memory(last_words):
        return f"out of memory ({ADVICE}): {last_words}"
    return last_words or WORDLESS


NO_TOKENS: Int32s = np.zeros(0, np.int32)
NO_LOGPROBS: Float32s = np.zeros(0, np.float32)
OF_NO_VERSION = Problem(
    "engine_failed",
    "SGLang has told tokens of which nobody knows the weights that computed them; "
    "see `rolloutbus doctor`.",
    "failed",
)
REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between `generate` and its last step."""

    key: AttemptKey
    rid: str
    """SGLang's id of it."""
    has_media: bool = False
    n_told: int = 0
    is_aborted: bool = False
    """Its end was asked for."""
    task: "asyncio.Task[None] | None" = None
    """Keeps it in SGLang, on the engine's loop; None: has not begun."""


class LiveRequests:
    """Turns what the scheduler taps tell into steps; any thread may call."""

    def __init__(self, sink: StepSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._none_left = threading.Condition(self._lock)
        self._by_rid: dict[str, LiveRequest] = {}
        self._by_key: dict[AttemptKey, LiveRequest] = {}
        self._readers: dict[str, LiveRequest] = {}
        """Requests of ours that belong to no key and report no steps."""
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._by_rid) + len(self._readers)

    def add(self, work: Work) -> LiveRequest:
        """Take a request in. ValueError: its key is in use."""
        with self._lock:
            if work.key in self._by_key:
                raise ValueError(f"key {work.key} is in use")
            rid = engine_rid(next(self._numbers), is_streamed=work.stream)
            live = LiveRequest(work.key, rid, has_media=bool(work.media))
            self._by_rid[rid] = self._by_key[work.key] = live
        return live

    def began_with(self, live: LiveRequest, lora: str) -> None:
        """Tell the adapter that a request is given, before SGLang hears of it."""
        self._sink(began_with(live.key, lora))

    def begin_reading(self) -> str:
        """SGLang's id for a request that tells no steps; it is live until `end_reading`."""
        with self._lock:
            rid = engine_rid(next(self._numbers), is_streamed=False)
            self._readers[rid] = LiveRequest((RequestId(""), (0, 0)), rid)
        return rid

    def end_reading(self, rids: Iterable[str]) -> None:
        """SGLang has answered them."""
        with self._lock:
            for rid in rids:
                del self._readers[rid]
            self._note_end_of_one()

    def find(self, keys: Iterable[AttemptKey]) -> list[LiveRequest]:
        """Live requests among `keys`."""
        with self._lock:
            return [live for key in keys if (live := self._by_key.get(key))]

    def all(self) -> list[LiveRequest]:
        """Everything live."""
        with self._lock:
            return [*self._by_rid.values(), *self._readers.values()]

    def has(self, rid: str) -> bool:
        """Whether SGLang's request of this id is live."""
        return rid in self._by_rid

    def wait_until_none(
        self, timeout_s: float | None = None, unless: Callable[[], object] = lambda: False
    ) -> bool:
        """Whether the last one has ended, waiting for it; None waits for ever.

        What `unless` says ends the wait; what changes that calls `wake`.
        """
        with self._none_left:
            self._none_left.wait_for(lambda: not len(self) or unless(), timeout_s)
            return not len(self)

    def wake(self) -> None:
        """Wake the waiting tasks, which then look again."""
        with self._none_left:
            self._none_left.notify_all()

    def tell(self, rows: Rows) -> list[LiveRequest]:
        """Pass on rows of a scheduler; returns the requests that SGLang has to end, too."""
        given_up: list[LiveRequest] = []
        with self._lock:
            step = self._step(rows) if rows.version is not None else self._gone(rows, given_up)
        if step.keys:
            self._sink(step)
        return given_up

    def end(self, rid: str, reason: FinishReason = "abort", problem: Problem | None = None) -> None:
        """A request ends without a word of the scheduler, which never ran it or lost it."""
        with self._lock:
            live = self._by_rid.get(rid)
            if live is None:
                return
            self._remove(live.key)
        self._sink(_last_step(live.key, reason, problem))

    def _gone(self, rows: Rows, given_up: list[LiveRequest]) -> Step:
        """Requests with tokens of no version fail; others only end."""
        ends = {finish.row: finish for finish in rows.finishes}
        keys: list[AttemptKey] = []
        finishes: list[tuple[int, FinishReason]] = []
        problems: list[tuple[int, Problem]] = []
        for row, (rid, n_new) in enumerate(zip(rows.rids, rows.counts, strict=True)):
            live = self._by_rid.get(rid)
            if live is None or not (n_new or row in ends):
                continue
            keys.append(live.key)
            self._remove(live.key)
            if n_new:
                problems.append((len(keys) - 1, OF_NO_VERSION))
                given_up.append(live)
            else:
                _note_end(ends[row], len(keys) - 1, finishes, problems)
        counts = [0] * len(keys)
        return Step(keys, counts, NO_TOKENS, NO_LOGPROBS, 0, finishes, problems=problems)

    def _step(self, rows: Rows) -> Step:
        assert rows.version is not None, "it was asked before"
        ends = {finish.row: finish for finish in rows.finishes}
        wanted = dict(rows.arrays)
        keys: list[AttemptKey] = []
        counts: list[int] = []
        parts: list[slice] = []
        finishes: list[tuple[int, FinishReason]] = []
        problems: list[tuple[int, Problem]] = []
        arrays: list[tuple[int, Mapping[str, Array]]] = []
        at = 0
        for row, (rid, n_new) in enumerate(zip(rows.rids, rows.counts, strict=True)):
            at += n_new
            live = self._by_rid.get(rid)
            if live is None:
                continue
            if row in wanted:
                arrays.append((len(keys), wanted[row]))
            keys.append(live.key)
            counts.append(n_new)
            parts.append(slice(at - n_new, at))
            live.n_told += n_new
            if row in ends:
                self._remove(live.key)
                _note_end(ends[row], len(keys) - 1, finishes, problems)
        columns = (rows.tokens, "<i4"), (rows.logprobs, "<f4"), (rows.support_logprobs, "<f4")
        tokens, logprobs, behaviour = (
            _column(raw, dtype, None if sum(counts) == at else parts) for raw, dtype in columns
        )
        return Step(
            *(keys, counts, tokens, logprobs, rows.version, finishes),
            behaviour_logprobs=behaviour if rows.support_logprobs else None,
            problems=problems,
            arrays=arrays,
        )

    def _remove(self, key: AttemptKey) -> None:
        live = self._by_key.pop(key)
        del self._by_rid[live.rid]
        self._note_end_of_one()

    def _note_end_of_one(self) -> None:
        if not len(self):
            self._none_left.notify_all()


def _column(raw: bytes, dtype: str, parts: Sequence[slice] | None) -> Any:  # noqa: ANN401 - of dtype
    """A column of the tap, or these parts of it; an empty one stays empty."""
    column = np.frombuffer(raw, dtype)
    return column if parts is None else np.concatenate([column[:0], *(column[p] for p in parts)])


def _note_end(
    end: RowFinish,
    row: int,
    finishes: list[tuple[int, FinishReason]],
    problems: list[tuple[int, Problem]],
) -> None:
    if end.status:
        problems.append((row, problem_of(end.message, end.status)))
    else:
        finishes.append((row, REASONS[end.kind]))


def status_of(error: BaseException, otherwise: int, *, has_media: bool) -> int:
    """HTTP status of what SGLang raised for a request: media that it cannot read are told as such.

    A package that reads them may be missing where the engine runs: no request can help that.
    """
    if not has_media:
        return otherwise
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return HTTPStatus.NOT_IMPLEMENTED
        cause = cause.__cause__ or cause.__context__
    return HTTPStatus.UNSUPPORTED_MEDIA_TYPE


def problem_of(message: str, status: int) -> Problem:
    """An abort that SGLang calls an error, by its HTTP status."""
    text = message[:500] or "SGLang gave the request up"
    if status == HTTPStatus.BAD_REQUEST:
        return Problem("bad_request", text, "not_started")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Problem("busy", text, "not_started", retry_after_ms=1000)
    if status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        return bad_request("media", text)
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return Problem("unsupported", text, "not_started", field="media")
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return cannot_sample(text)
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return TOO_SLOW
    if status == HTTPStatus.FAILED_DEPENDENCY:
        return BROKEN_ADAPTER if text == BROKEN_ADAPTER.message else BROKEN_WEIGHTS
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Problem("result_too_large", text, "failed", field="want")
    code = "out_of_memory" if is_out_of_memory(text) else "engine_failed"
    return Problem(code, text, "failed")


def _last_step(key: AttemptKey, reason: FinishReason, problem: Problem | None) -> Step:
    if problem is not None:
        return Step([key], [0], NO_TOKENS, NO_LOGPROBS, 0, problems=[(0, problem)])
    return Step([key], [0], NO_TOKENS, NO_LOGPROBS, 0, [(0, reason)])
