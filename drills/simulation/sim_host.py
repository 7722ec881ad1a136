"""A simulated engine host: tokens of a pure function at a simulated pace."""

from collections.abc import Callable
from typing import cast

import msgspec

from bus.codec import pack, unpack
from bus.entry import Entry
from bus.ids import Attempt
from bus.messages.control import Flushed, Memory
from bus.messages.endings import Done
from bus.messages.generation import Abort, Generate
from bus.messages.host import EngineBeat, EngineReady
from bus.messages.stream import Deltas
from bus.messages.weights import Committed, CommitUpdate, Prepared, PrepareUpdate
from bus.testing import VirtualTime
from drills.simulation.sim_tokens import TOKEN_BYTES, VOCAB_SIZE, continuation

TOKENS_PER_STEP = 8
BEAT_S = 2.0
POISON = (666).to_bytes(4, "little")
"""A prompt that begins with this token kills the engine that samples from it."""
CAPABILITIES = [
    "pause", "resume", "sleep", "wake_up", "flush_cache",
    "prepare_update", "commit_update", "abort_update",
]  # fmt: skip

Key = tuple[str, Attempt]


class SimRow:
    """One running request."""

    __slots__ = ("max_new_tokens", "n_tokens", "prompt", "seed")

    def __init__(self, body: Generate) -> None:
        self.prompt = body.prompt
        self.seed = body.sampling.seed or 0
        self.n_tokens = len(body.prefix.tokens) // TOKEN_BYTES if body.prefix else 0
        self.max_new_tokens = body.sampling.max_new_tokens


class SimHost:
    """Answers a worker core as an engine host does."""

    def __init__(
        self,
        time: VirtualTime,
        pace: tuple[float, int],
        say: Callable[["SimHost", Entry], None],
        crash: Callable[["SimHost"], None],
    ) -> None:
        """`pace` is (seconds per step, requests that run side by side)."""
        self.is_alive = True
        self._time = time
        self._step_s, self._slots = pace
        self._say, self._crash = say, crash
        self._rows: dict[Key, SimRow] = {}
        self._is_paused = self._is_stepping = False
        self._version = self._n_steps = 0
        self._frozen_until = 0.0

    def start(self, after_s: float) -> None:
        """Become ready after a while."""
        self._time.later(after_s, self._ready)

    def freeze(self, until: float) -> None:
        """Stopped together with its worker."""
        self._frozen_until = until

    def hear(self, entry: Entry) -> None:
        """The worker core sends something."""
        if not self.is_alive:
            return
        if entry.kind == "generate":
            row = SimRow(cast("Generate", unpack(entry)))
            self._rows[entry.rid, entry.attempt] = row
            self._go_on()
            if row.prompt.startswith(POISON):
                self._time.later(self._step_s, lambda: self._crash(self))
        elif entry.kind == "abort":
            rids = set(cast("Abort", unpack(entry)).rids)
            for key in [key for key in self._rows if key[0] in rids]:
                del self._rows[key]
        else:
            self._time.later(self._step_s, lambda: self._carry_out(entry))

    def _ready(self) -> None:
        if self.is_alive:
            ready = EngineReady("fake", VOCAB_SIZE, 4096, self._slots, [], CAPABILITIES)
            self._say(self, Entry("engine_ready", body=pack(ready)))
            self._time.every(BEAT_S, self._beat)

    def _beat(self) -> bool:
        if self.is_alive and self._time.now >= self._frozen_until:
            beat = EngineBeat(self._n_steps, len(self._rows), 0, 0, self._version)
            self._say(self, Entry("engine_beat", body=pack(beat)))
        return self.is_alive

    def _carry_out(self, entry: Entry) -> None:
        if self.is_alive:
            result = self._result_of(entry)
            self._say(self, Entry("finished", entry.rid, entry.attempt, body=pack(result)))

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
                self._go_on()
                return Done()

    def _go_on(self) -> None:
        """Step again, unless a step is due already: an idle engine makes no events."""
        if not self._is_stepping:
            self._is_stepping = True
            self._time.later(self._step_s, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if not self.is_alive or not self._rows or self._is_paused:
            return
        left_s = self._frozen_until - self._time.now
        if left_s > 0:
            self._is_stepping = True
            self._time.later(left_s, self._step)
            return
        self._n_steps += 1
        self._say(self, Entry("deltas", body=pack(self._deltas())))
        if self._rows:
            self._go_on()

    def _deltas(self) -> Deltas:
        deltas = Deltas([], [], [], [], b"", b"", [], [])
        tokens: list[bytes] = []
        logprobs: list[bytes] = []
        for index, (key, row) in enumerate(list(self._rows.items())[: self._slots]):
            start = row.n_tokens
            stop = row.n_tokens = min(row.max_new_tokens, start + TOKENS_PER_STEP)
            part = slice(start * TOKEN_BYTES, stop * TOKEN_BYTES)
            columns = continuation(row.prompt, row.seed, self._version)
            tokens.append(columns[0][part])
            logprobs.append(columns[1][part])
            deltas.rids.append(key[0])
            deltas.attempts.append(key[1])
            deltas.seqs.append(start)
            deltas.counts.append(stop - start)
            if stop >= row.max_new_tokens:
                deltas.finishes.append((index, "length"))
                del self._rows[key]
        return msgspec.structs.replace(
            deltas,
            tokens=b"".join(tokens),
            logprobs=b"".join(logprobs),
            versions=[self._version] * len(deltas.rids),
        )
