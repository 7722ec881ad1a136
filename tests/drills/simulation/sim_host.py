"""A simulated engine host: tokens of a pure function at a simulated pace."""

from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.messages.control import Flushed, Memory
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Abort, Deltas, FinishReason, Generate
from rolloutbus.bus.wire.messages.host import EngineHeartbeat, EngineReady
from rolloutbus.bus.wire.messages.weights import AbortUpdate, CommitUpdate, PrepareUpdate
from tests.drills.simulation.sim_tokens import TOKEN_BYTES, VOCAB_SIZE, continuation
from tests.drills.simulation.sim_weights import WAYS, Answer, SimWeights
from tests.drills.simulation.virtual_time import VirtualTime
from tests.drills.simulation.watch import UpdatePhase

TOKENS_PER_STEP = 16
BEAT_S = 3.5
SILENT_S = 4.0
"""A host without a word for so long is noticed; both are longer than usual, because heartbeats of
idle engines would be most of what happens."""
POISON = (666).to_bytes(4, "little")
"""A prompt that begins with this token kills the engine that samples from it."""
CAPABILITIES = [
    "pause", "resume", "sleep", "wake_up", "flush_cache",
    "prepare_update", "commit_update", "abort_update",
]  # fmt: skip

STORES_HOST = "host-0"
"""Where the store is, and some of the workers."""

Key = tuple[str, Attempt]


def host_of(worker: str) -> str:
    """The machine of a worker: every other one is the store's."""
    return f"host-{int(worker[1:]) % 2}"


class SimRow:
    """One running request."""

    __slots__ = ("is_poison", "max_new_tokens", "n_tokens", "prompt", "seed")

    def __init__(self, body: Generate) -> None:
        self.prompt = body.prompt
        self.is_poison = body.prompt.startswith(POISON)
        self.seed = body.sampling.sampling_seed or 0
        self.n_tokens = len(body.prefix.tokens) // TOKEN_BYTES if body.prefix else 0
        self.max_new_tokens = body.sampling.max_new_tokens


class Owner(Protocol):
    """The worker process of an engine host."""

    name: str

    def host_says(self, host: "SimHost", entry: Entry) -> None:
        """The host sends something."""
        ...

    def engine_failed(self, rid: str) -> None:
        """The engine reports an error instead of this request's tokens."""
        ...

    def engine_struck(self, host: "SimHost", rid: str) -> None:
        """The engine dies of this request."""
        ...

    def can_pull(self) -> bool:
        """Whether the store can be reached."""
        ...

    def update_reached(self, phase: UpdatePhase) -> None:
        """A weight update has come so far."""
        ...


class SimHost:
    """Answers a worker core as an engine host does."""

    def __init__(self, time: VirtualTime, pace: tuple[float, int], owner: Owner) -> None:
        """`pace` is (seconds per step, requests that run side by side)."""
        self.is_alive = True
        self.sick_until = 0.0
        """Until then its engine fails whatever it is given."""
        self._time = time
        self._step_s, self._slots = pace
        self._owner = owner
        self._weights = SimWeights(self._later, pace[0], owner.can_pull, owner.update_reached)
        self._rows: dict[Key, SimRow] = {}
        self._is_paused = self._is_stepping = False
        self._n_steps = 0
        self._frozen_until = 0.0

    @property
    def version(self) -> int:
        """Weights that it samples with."""
        return self._weights.version

    def start(self, after_s: float) -> None:
        """Become ready after a while."""
        self._time.later(after_s, self._ready)

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped now."""
        return self._time.now < self._frozen_until

    def freeze(self, until: float) -> None:
        """Stopped together with its worker."""
        self._frozen_until = until

    def hear(self, entry: Entry) -> None:
        """The worker core sends something."""
        if not self.is_alive:
            return
        if entry.kind == "generate":
            self._rows[entry.rid, entry.attempt] = SimRow(cast("Generate", unpack(entry)))
            self._go_on()
        elif entry.kind == "abort":
            rids = set(cast("Abort", unpack(entry)).rids)
            for key in [key for key in self._rows if key[0] in rids]:
                del self._rows[key]
        else:
            self._later(lambda: self._carry_out(entry))

    def _later(self, action: Callable[[], None]) -> None:
        """After one step, or as soon as it is thawed; never if it dies before."""

        def act() -> None:
            left_s = self._frozen_until - self._time.now
            if left_s > 0:
                self._time.later(left_s, act)
            elif self.is_alive:
                action()

        self._time.later(self._step_s, act)

    def _ready(self) -> None:
        if self.is_alive:
            name = self._owner.name
            ready = EngineReady(
                engine="fake",
                vocab_size=VOCAB_SIZE,
                max_context=4096,
                slots=self._slots,
                eos_token_ids=[],
                capabilities=CAPABILITIES,
                host=host_of(name),
                gpus=[f"GPU-{name}"],
                bulk=f"ipc:///sim/relay-{name}",
                transports=WAYS,
                features=["seed"],
            )
            self._owner.host_says(self, Entry("engine_ready", body=pack(ready)))
            self._time.every(BEAT_S, self._heartbeat)

    def _heartbeat(self) -> bool:
        if self.is_alive and self._time.now >= self._frozen_until:
            heartbeat = EngineHeartbeat(self._n_steps, len(self._rows), 0, 0, self.version)
            self._owner.host_says(self, Entry("engine_beat", body=pack(heartbeat)))
        return self.is_alive

    def _carry_out(self, entry: Entry) -> None:
        def say(answer: Answer) -> None:
            kind, result = answer
            ending = Entry(kind, entry.rid, entry.attempt, body=pack(result))
            self._owner.host_says(self, ending)

        body = unpack(entry)
        if isinstance(body, PrepareUpdate):
            self._weights.prepare(body, say)
        else:
            say(self._answer_of(entry.kind, body))

    def _answer_of(self, kind: str, body: msgspec.Struct) -> Answer:
        match body:
            case CommitUpdate():
                return self._weights.commit(body)
            case AbortUpdate():
                self._weights.abort(body)
                return "finished", Done()
            case _ if kind in {"sleep", "wake_up"}:
                return "finished", Memory({}, [])
            case _ if kind == "flush_cache":
                return "finished", Flushed(0)
            case _:
                self._is_paused = {"pause": True, "resume": False}.get(kind, self._is_paused)
                self._go_on()
                return "finished", Done()

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
        if self.sick_until > self._time.now:
            self._fail_rows()
            return
        sampled = self._sampled()
        for (rid, _), row in sampled:
            if row.is_poison:
                self._owner.engine_struck(self, rid)
                return
        self._owner.host_says(self, Entry("deltas", body=pack(self._deltas(sampled))))
        if self._rows:
            self._go_on()

    def _sampled(self) -> list[tuple[Key, SimRow]]:
        """What this step samples from; the others wait for a slot."""
        return list(self._rows.items())[: self._slots]

    def _fail_rows(self) -> None:
        rows, self._rows = self._rows, {}
        body = pack(Problem("engine_failed", "The engine is sick.", "failed"))
        for rid, attempt in rows:
            self._owner.engine_failed(rid)
            self._owner.host_says(self, Entry("failed", rid, attempt, body=body))

    def _deltas(self, sampled: list[tuple[Key, SimRow]]) -> Deltas:
        version = self.version
        seqs: list[int] = []
        counts: list[int] = []
        tokens = logprobs = b""
        finishes: list[tuple[int, FinishReason]] = []
        for index, (key, row) in enumerate(sampled):
            start = row.n_tokens
            stop = row.n_tokens = min(row.max_new_tokens, start + TOKENS_PER_STEP)
            columns = continuation(row.prompt, row.seed, version)
            tokens += columns[0][start * TOKEN_BYTES : stop * TOKEN_BYTES]
            logprobs += columns[1][start * TOKEN_BYTES : stop * TOKEN_BYTES]
            seqs.append(start)
            counts.append(stop - start)
            if stop >= row.max_new_tokens:
                finishes.append((index, "length"))
                del self._rows[key]
        return Deltas(
            rids=[rid for (rid, _), _ in sampled],
            attempts=[attempt for (_, attempt), _ in sampled],
            seqs=seqs,
            counts=counts,
            tokens=tokens,
            logprobs=logprobs,
            versions=[version] * len(sampled),
            finishes=finishes,
        )
