"""Engine steps on their way from the engine's thread to the host's loop, and into columns."""

import asyncio
import operator
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

import numpy as np

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Attempt, AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES, MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Array, ArrayDtype, Deltas, FinishReason
from rolloutbus.bus.wire.messages.host import Extras
from rolloutbus.bus.wire.validation import is_pinned
from rolloutbus.bus.wire.versions import MAX_VERSION
from rolloutbus.engine_worker.engine import Step

RESERVE_BYTES = 256 * 1024
"""Of a result's body, for all that is neither array nor column."""
COLUMNS_BYTES = 12
"""Of a result, for each of its tokens."""

_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class StepBuffer:
    """Takes steps from any thread; on the loop, all that wait become one `deltas` entry."""

    def __init__(self, on_entry: Callable[[Entry], None]) -> None:
        """`on_entry` gets `deltas`, and before them `extras` and `failed` of what is in them."""
        self._loop = asyncio.get_running_loop()
        self._on_entry = on_entry
        self._steps: deque[Step] = deque()
        self._is_scheduled = False
        self._next_seq: dict[AttemptKey, int] = {}
        self._attempts: dict[str, Attempt] = {}

    def sink(self, step: Step) -> None:
        """Called by the engine after each step, from its own thread; never blocks."""
        self._steps.append(step)
        # Set before the loop is notified and cleared before it reads: no step is left behind.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop was closed: the host is on its way out
                return

    def begin(self, key: AttemptKey, n_prefix: int) -> None:
        """Begin a request; its first token gets index `n_prefix`."""
        self._next_seq[key] = n_prefix
        self._attempts[key[0]] = key[1]

    def open_key(self, rid: str) -> AttemptKey | None:
        """The execution of this request that the engine has not finished."""
        attempt = self._attempts.get(rid)
        return None if attempt is None else (RequestId(rid), attempt)

    def _drain(self) -> None:
        self._is_scheduled = False
        steps: list[Step] = []
        while self._steps:
            steps.append(_checked(self._steps.popleft()))
        if steps:
            merged = self._merged(steps)
            self._on_entry(Entry("deltas", body=pack(merged)))

    def _merged(self, steps: list[Step]) -> Deltas:
        has_behaviour = any(step.behaviour_logprobs is not None for step in steps)
        merged = Deltas(
            rids=[key[0] for step in steps for key in step.keys],
            attempts=[key[1] for step in steps for key in step.keys],
            seqs=[],
            counts=[count for step in steps for count in step.counts],
            tokens=b"".join(step.tokens.tobytes() for step in steps),
            logprobs=b"".join(step.logprobs.tobytes() for step in steps),
            versions=[step.version for step in steps for _ in step.keys],
            behaviour_logprobs=b"".join(_behaviour(step) for step in steps)
            if has_behaviour
            else b"",
        )
        n_rows = 0
        for step in steps:
            self._count(step, merged.seqs)
            if step.arrays or step.problems or step.adapters:
                self._send_extras(step)
            for row, reason in step.finishes:
                merged.finishes.append((n_rows + row, reason))
                self._end(step.keys[row])
            n_rows += len(step.keys)
        return merged

    def _send_extras(self, step: Step) -> None:
        """Send what of the step does not fit into columns; it must be known before the end is."""
        for row, lora in step.adapters:
            key = step.keys[row]
            extras = Extras(key[0], key[1], lora=lora)
            self._on_entry(Entry("extras", key[0], key[1], body=pack(extras)))
        for row, arrays in step.arrays:
            key = step.keys[row]
            problem = _too_large(arrays, self._next_seq.get(key, 0))
            if problem is None:
                extras = Extras(key[0], key[1], dict(arrays))
                self._on_entry(Entry("extras", key[0], key[1], body=pack(extras)))
            else:
                self._on_entry(Entry("failed", key[0], key[1], body=pack(problem)))
        for row, problem in step.problems:
            key = step.keys[row]
            self._on_entry(Entry("failed", key[0], key[1], body=pack(problem)))
            self._end(key)

    def _end(self, key: AttemptKey) -> None:
        self._next_seq.pop(key, None)
        if self._attempts.get(key[0]) == key[1]:
            del self._attempts[key[0]]

    def _count(self, step: Step, seqs: list[int]) -> None:
        next_seq = self._next_seq
        for key, count in zip(step.keys, step.counts, strict=True):
            seq = next_seq.get(key, 0)
            seqs.append(seq)
            next_seq[key] = seq + count


def _checked(step: Step) -> Step:
    """The step, with the rows ended that hold values which cannot be sent.

    A value of a wrong type ends the requests that it belongs to, not the process.
    """
    wrong = _wrong_columns(step)
    if wrong:
        problem = Problem("engine_failed", f"the engine's step has {wrong}", "failed")
        none = [0] * len(step.keys)
        problems = [(row, problem) for row in range(len(none))]
        return Step(step.keys, none, _NO_TOKENS, _NO_LOGPROBS, 0, problems=problems)
    if not (step.finishes or step.arrays or step.adapters):
        return step
    ended = dict(step.problems)
    for row, reason in step.finishes:
        if reason not in get_args(FinishReason):
            _end_row(ended, row, f"ended by {reason!r:.40}, which is no finish reason")
    for row, arrays in step.arrays:
        wrong = next((name for name, each in arrays.items() if not _is_array(each)), None)
        if wrong is not None:
            _end_row(ended, row, f"given {wrong!r:.40}, which is no array of the bus")
    for row, lora in step.adapters:
        if not _is_adapter(lora):
            _end_row(ended, row, f"given the adapter {lora!r:.60}, which is no NAME@VERSION")
    if len(ended) == len(step.problems):
        return step
    return replace(
        step,
        finishes=[(row, reason) for row, reason in step.finishes if row not in ended],
        arrays=[(row, arrays) for row, arrays in step.arrays if row not in ended],
        adapters=[(row, lora) for row, lora in step.adapters if row not in ended],
        problems=list(ended.items()),
    )


def _end_row(ended: dict[int, Problem], row: int, what: str) -> None:
    ended.setdefault(row, Problem("engine_failed", f"the request was {what}", "failed"))


def _is_adapter(value: object) -> bool:
    """Whether it names an adapter and its version."""
    return isinstance(value, str) and is_pinned(value)


def _is_array(value: object) -> bool:
    """Whether it can be sent; its content is not copied for that."""
    return (
        isinstance(value, Array)
        and value.dtype in get_args(ArrayDtype)
        and type(value.data) is bytes
        and all(type(size) is int and size >= 0 for size in value.shape)
    )


def _wrong_columns(step: Step) -> str:
    """What is wrong with columns that all rows share; empty if nothing is."""
    columns = [("tokens", step.tokens, np.int32), ("logprobs", step.logprobs, np.float32)]
    if step.behaviour_logprobs is not None:
        columns.append(("behaviour_logprobs", step.behaviour_logprobs, np.float32))
    try:
        n_tokens = sum(step.counts)
        if len(step.counts) != len(step.keys) or min(step.counts, default=0) < 0:
            return f"counts that do not fit its {len(step.keys)} rows"
        if not 0 <= operator.index(step.version) <= MAX_VERSION:
            return "a version that is no uint64"
        for name, column, dtype in columns:
            if column.dtype != dtype or column.shape != (n_tokens,):
                return f"{name} {column.dtype} {column.shape}, not {dtype.__name__} ({n_tokens},)"
    except (TypeError, AttributeError) as error:
        return f"a value of a wrong type: {error}"
    return ""


def _behaviour(step: Step) -> bytes:
    if step.behaviour_logprobs is not None:
        return step.behaviour_logprobs.tobytes()
    # The engine reports that nothing was truncated; requests that asked for it must notice.
    return np.full(len(step.tokens), np.nan, "<f4").tobytes()


def _too_large(arrays: Mapping[str, Array], n_tokens: int) -> Problem | None:
    """Why a result of so many tokens cannot hold these; None if it can."""
    sizes = {name: len(each.data) for name, each in arrays.items()}
    size_bytes = sum(sizes.values())
    room_bytes = MAX_BODY_BYTES - RESERVE_BYTES - COLUMNS_BYTES * n_tokens
    if size_bytes <= room_bytes and max(sizes.values(), default=0) <= MAX_PIECE_BYTES:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    message = (
        f"the arrays asked for take {size_bytes} bytes, {largest} most of them; "
        f"a result has room for {room_bytes}, and for {MAX_PIECE_BYTES} in one array"
    )
    return Problem("result_too_large", message, "failed", field="want")
