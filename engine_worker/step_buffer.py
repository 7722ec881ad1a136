"""Engine steps on their way from the engine's thread to the host's loop, and into columns."""

import asyncio
from collections import deque
from collections.abc import Callable

from bus.codec import pack
from bus.entry import Entry
from bus.ids import Attempt, AttemptKey, RequestId
from bus.messages.stream import Deltas
from engine_worker.engine import Step


class StepBuffer:
    """Takes steps from any thread; on the loop, all that wait become one `deltas` entry."""

    def __init__(self, on_deltas: Callable[[Entry], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_deltas = on_deltas
        self._steps: deque[Step] = deque()
        self._is_scheduled = False
        self._next_seq: dict[AttemptKey, int] = {}
        self._attempts: dict[str, Attempt] = {}

    def sink(self, step: Step) -> None:
        """Called by the engine after each step, from its own thread; never blocks."""
        self._steps.append(step)
        # Set before the loop is told and cleared before it reads: a step is never left behind.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop was closed: the host is on its way out
                return

    def begin(self, key: AttemptKey, n_prefix: int) -> None:
        """A request whose first token will have index `n_prefix`."""
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
            steps.append(self._steps.popleft())
        if steps:
            self._on_deltas(Entry("deltas", body=pack(self._merged(steps))))

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
            for row, reason in step.finishes:
                merged.finishes.append((n_rows + row, reason))
                self._end(step.keys[row])
            n_rows += len(step.keys)
        return merged

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


def _behaviour(step: Step) -> bytes:
    columns = step.logprobs if step.behaviour_logprobs is None else step.behaviour_logprobs
    return columns.tobytes()
