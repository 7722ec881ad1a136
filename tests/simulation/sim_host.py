"""A simulated engine host: the fake engine's tokens at a simulated pace."""

from collections.abc import Callable
from typing import cast

import msgspec
import numpy as np

from bus.codec import pack, unpack
from bus.entry import Entry
from bus.messages.control import Flushed, Memory
from bus.messages.endings import Done
from bus.messages.generation import Abort, Generate
from bus.messages.host import EngineBeat, EngineReady
from bus.messages.stream import Deltas
from bus.messages.weights import Committed, CommitUpdate, Prepared, PrepareUpdate
from bus.testing import VirtualTime
from engine_worker.engines.fake_tokens import (
    FAKE_VOCAB_SIZE,
    fake_logprob,
    prompt_digest,
    token_after,
)

SLOTS = 8
TOKENS_PER_STEP = 4
CAPABILITIES = [
    "pause", "resume", "sleep", "wake_up", "flush_cache",
    "prepare_update", "commit_update", "abort_update",
]  # fmt: skip


class SimRow:
    """One running request."""

    def __init__(self, entry: Entry, body: Generate) -> None:
        self.rid, self.attempt = entry.rid, entry.attempt
        self.digest = prompt_digest(body.prompt)
        self.seed = body.sampling.seed or 0
        self.n_tokens = len(body.prefix.tokens) // 4 if body.prefix else 0
        self.max_new_tokens = body.sampling.max_new_tokens


class SimHost:
    """Answers a worker core as an engine host does."""

    def __init__(
        self, time: VirtualTime, step_s: float, say: Callable[[list[Entry]], None]
    ) -> None:
        self._time = time
        self._step_s = step_s
        self._say = say
        self._rows: dict[tuple[str, tuple[int, int]], SimRow] = {}
        self._is_paused = False
        self._version = 0
        self._n_steps = 0
        self.is_alive = True
        self.executions: list[tuple[str, tuple[int, int]]] = []

    def start(self, after_s: float) -> None:
        """Become ready after a while."""
        self._time.later(after_s, self._ready)

    def hear(self, entry: Entry) -> None:
        """The worker core sends something."""
        if not self.is_alive:
            return
        if entry.kind == "generate":
            body = cast("Generate", unpack(entry))
            self._rows[entry.rid, entry.attempt] = SimRow(entry, body)
            self.executions.append((entry.rid, entry.attempt))
        elif entry.kind == "abort":
            self._abort(cast("Abort", unpack(entry)))
        else:
            self._time.later(self._step_s, lambda: self._carry_out(entry))

    def _ready(self) -> None:
        if self.is_alive:
            ready = EngineReady("fake", FAKE_VOCAB_SIZE, 4096, SLOTS, [], CAPABILITIES)
            self._say([Entry("engine_ready", body=pack(ready))])
            self._time.every(self._step_s, self._step)
            self._time.every(0.25, self._beat)

    def _beat(self) -> bool:
        if self.is_alive:
            beat = EngineBeat(self._n_steps, len(self._rows), 0, 0, self._version)
            self._say([Entry("engine_beat", body=pack(beat))])
        return self.is_alive

    def _abort(self, body: Abort) -> None:
        for key in [key for key in self._rows if key[0] in body.rids]:
            del self._rows[key]

    def _carry_out(self, entry: Entry) -> None:
        if self.is_alive:
            result = self._result_of(entry)
            self._say([Entry("finished", entry.rid, entry.attempt, body=pack(result))])

    def _result_of(self, entry: Entry) -> msgspec.Struct:
        body = unpack(entry)
        match body:
            case PrepareUpdate():
                return Prepared(body.version, 64, "shm", 1.0)
            case CommitUpdate():
                self._version = body.version
                return Committed(body.version, self._step_s * 1000)
            case _ if entry.kind in {"sleep", "wake_up"}:
                return Memory({}, [])
            case _ if entry.kind == "flush_cache":
                return Flushed(0)
            case _:
                self._is_paused = {"pause": True, "resume": False}.get(entry.kind, self._is_paused)
                return Done()

    def _step(self) -> bool:
        if not self.is_alive:
            return False
        if not self._rows or self._is_paused:
            return True
        self._n_steps += 1
        rows = list(self._rows.items())[:SLOTS]
        self._say([Entry("deltas", body=pack(self._deltas(rows)))])
        return True

    def _deltas(self, rows: list[tuple[tuple[str, tuple[int, int]], SimRow]]) -> Deltas:
        tokens: list[int] = []
        seqs: list[int] = []
        counts: list[int] = []
        finishes: list[tuple[int, str]] = []
        for index, (key, row) in enumerate(rows):
            start = row.n_tokens
            stop = min(row.max_new_tokens, start + TOKENS_PER_STEP)
            new = [token_after(row.digest, row.seed, i, self._version) for i in range(start, stop)]
            tokens += new
            seqs.append(start)
            counts.append(len(new))
            row.n_tokens = stop
            if stop >= row.max_new_tokens:
                finishes.append((index, "length"))
                del self._rows[key]
        return Deltas(
            rids=[row.rid for _, row in rows],
            attempts=[row.attempt for _, row in rows],
            seqs=seqs,
            counts=counts,
            tokens=np.array(tokens, "<i4").tobytes(),
            logprobs=np.array([fake_logprob(token) for token in tokens], "<f4").tobytes(),
            versions=[self._version] * len(rows),
            finishes=finishes,
        )
