"""An engine without a model: known tokens, chosen costs, faults on demand.

For tests, simulations and benchmarks of everything around an engine. It does not show how a real
engine behaves.
"""

import ctypes
import hashlib
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.messages.control import DEVICE, CacheTier
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.bus.wire.validation import truncates
from rolloutbus.engine_worker.engine import (
    Bytes,
    EngineFacts,
    EngineStats,
    MemoryFreed,
    PauseMode,
    Step,
    StepSink,
    TensorSpec,
    Work,
)
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.shared.live_weights import LiveWeights
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, open_request
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

FAKE_VOCAB_SIZE = 32_000
FAKE_EOS = 0
"""Never drawn: fake requests end at their limit or at a stop id of their own."""


def fake_token(prompt: bytes, seed: int, index: int, version: int) -> int:
    """Token `index` of a request under weights of `version`, in [1, FAKE_VOCAB_SIZE).

    `prompt`: int32 [n_prompt_tokens] as little-endian bytes; `seed`: 0 if the request has none;
    `index` counts from the first generated token, a resumed prefix included.
    """
    return token_after(prompt_digest(prompt), seed, index, version)


def fake_logprob(token: int) -> float:
    """The logprob that the fake engine reports for `token`, exact in float32."""
    return -1.0 - (token % 1024) / 1024.0


def prompt_digest(prompt: bytes) -> bytes:
    """What a prompt contributes to its tokens, 16 bytes."""
    return hashlib.blake2b(prompt, digest_size=16).digest()


def token_after(digest: bytes, seed: int, index: int, version: int) -> int:
    """Like `fake_token`, but takes the digest of the prompt."""
    place = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, version)
    drawn = hashlib.blake2b(place, key=digest, digest_size=8).digest()
    return 1 + int.from_bytes(drawn, "little") % (FAKE_VOCAB_SIZE - 1)


MAX_CACHED = 100_000
"""Prompts remembered; the oldest are forgotten first."""


FAKE_SPECS = (
    TensorSpec("embed.weight", "F32", (8, 4), 128),
    TensorSpec("head.weight", "F32", (4,), 16),
)


class FakeWeights:
    """Implements `WeightMemory`: zeros at first."""

    specs = FAKE_SPECS
    are_aside = False

    def __init__(self) -> None:
        self._held = {spec.name: np.zeros(spec.size_bytes, np.uint8) for spec in FAKE_SPECS}

    @property
    def content(self) -> Mapping[str, bytes]:
        """Tensor -> its bytes."""
        return {name: held.tobytes() for name, held in self._held.items()}

    def write(self, name: str, offset: int, raw: RawTensor) -> None:
        """See `WeightMemory`."""
        self._held[name][offset : offset + raw.nbytes] = np.asarray(raw)

    def read(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """See `WeightMemory`."""
        return self._held[name][offset : offset + size_bytes].copy()

    def settle(self) -> None:
        """All that was written is there."""


@dataclass(slots=True, eq=False)
class _Row:
    """A running request."""

    request: EngineRequest
    digest: bytes
    n_to_prefill: int


class FakeBatch:
    """Implements `Stepper`: every request gets one token per step."""

    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._rows: dict[AttemptKey, _Row] = {}
        self._cached: dict[bytes, int] = {}
        """Digests of known prompts and how many tokens each has."""
        self._n_steps = 0
        self.version = 0
        """See `Stepper`."""

    @property
    def n_running(self) -> int:
        """See `Stepper`."""
        return len(self._rows)

    @property
    def n_kv_tokens(self) -> int:
        """See `Stepper`."""
        return sum(row.request.n_tokens for row in list(self._rows.values()))

    def change_weights(self, version: int) -> None:
        """From now on steps are of `version`."""
        self.version = version
        self._cached.clear()

    def flush(self) -> int:
        """Forget cached prompts; returns how many tokens they had."""
        n_tokens = sum(self._cached.values())
        self._cached.clear()
        return n_tokens

    def admit(self, waiting: deque[EngineRequest]) -> None:
        """See `Stepper`."""
        while waiting and len(self._rows) < self._settings.slots:
            request = waiting.popleft()
            digest = prompt_digest(request.prompt.tobytes())
            n_known = self._cached.get(digest, 0)
            self._rows[request.key] = _Row(request, digest, request.n_tokens - n_known)
            self._cached[digest] = len(request.prompt)
            if len(self._cached) > MAX_CACHED:
                del self._cached[next(iter(self._cached))]

    def compute(self) -> None:
        """See `Stepper`."""
        settings = self._settings
        self._n_steps += 1
        self._misbehave()
        cost_s = settings.step_s + settings.step_s_per_request * len(self._rows)
        if settings.prefill_s_per_token:
            n_prefill = sum(row.n_to_prefill for row in self._rows.values())
            cost_s += settings.prefill_s_per_token * n_prefill
        if settings.slow_after_steps and self._n_steps >= settings.slow_after_steps:
            cost_s *= settings.slow_factor
        if cost_s > 0.0:
            time.sleep(cost_s)

    def accept(self, dropped: AbstractSet[AttemptKey]) -> Step:
        """See `Stepper`."""
        limit = self._token_limit()
        rows = [
            row
            for row in self._rows.values()
            if row.request.key not in dropped and len(row.request.tokens) < limit
        ]
        finishes: list[tuple[int, FinishReason]] = []
        tokens: list[int] = []
        for i, row in enumerate(rows):
            request = row.request
            token = token_after(row.digest, request.seed, len(request.tokens), self.version)
            request.tokens.append(token)
            tokens.append(token)
            row.n_to_prefill = 0
            if (reason := request.ending()) is not None:
                assert not isinstance(reason, Problem), "it looks for no texts"
                finishes.append((i, reason))
                del self._rows[request.key]
        logprobs = np.array([fake_logprob(token) for token in tokens], np.float32)
        return Step(
            keys=[row.request.key for row in rows],
            counts=[1] * len(rows),
            tokens=np.array(tokens, np.int32),
            logprobs=logprobs,
            version=self.version,
            finishes=finishes,
            # Truncation would leave everything.
            behaviour_logprobs=logprobs if any(map(_truncates, rows)) else None,
        )

    def release(self, keys: Collection[AttemptKey]) -> None:
        """See `Stepper`."""
        for key in keys:
            self._rows.pop(key, None)

    def retract(self, *, without_tokens_only: bool = False) -> list[EngineRequest]:
        """See `Stepper`. A fake prefill is never half done."""
        if without_tokens_only:
            return []
        rows, self._rows = list(self._rows.values()), {}
        return [row.request for row in rows]

    def _token_limit(self) -> int:
        """How many tokens a request may have at this moment."""
        if self._settings.hold_file:
            try:
                return int(Path(self._settings.hold_file).read_text())
            except FileNotFoundError:
                return sys.maxsize
        return sys.maxsize

    def _misbehave(self) -> None:
        settings = self._settings
        if self._n_steps == settings.hang_after_steps:
            threading.Event().wait()
        if self._n_steps == settings.fail_after_steps:
            raise RuntimeError(f"asked to fail at step {self._n_steps}")
        if self._n_steps == settings.exit_after_steps:
            os._exit(settings.exit_code)
        if self._n_steps == settings.hold_gil_after_steps:
            ctypes.PyDLL(None).pause()  # unlike CDLL, it keeps the lock of the interpreter
        poison = settings.poison_token
        if poison is not None and any(r.request.prompt[0] == poison for r in self._rows.values()):
            os.abort()


def _truncates(row: _Row) -> bool:
    return truncates(row.request.sampling)


class FakeMemory:
    """Implements `MemoryTiers`: there is none to give up, but nothing steps while it is asleep."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._asleep: set[str] = set()

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        return self._loop.call(lambda: self._sleep(tags))

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        return self._loop.call(lambda: self._wake_up(tags))

    def _sleep(self, tags: Sequence[str]) -> MemoryFreed:
        self._loop.retract()
        fresh = set(tags) - self._asleep
        self._asleep |= fresh
        for tag in fresh:
            self._loop.halt(tag)
        return MemoryFreed(dict.fromkeys(sorted(fresh), 0))

    def _wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        woken = set(tags) & self._asleep
        self._asleep -= woken
        for tag in woken:
            self._loop.lift(tag)
        return MemoryFreed(dict.fromkeys(sorted(woken), 0))


class FakeCache:
    """Implements `PrefixCache`."""

    tiers: Sequence[CacheTier] = (DEVICE,)

    def __init__(self, loop: StepLoop, batch: FakeBatch) -> None:
        self._loop = loop
        self._batch = batch

    def flush(self, tiers: Sequence[CacheTier]) -> int:  # noqa: ARG002 - there is one
        """See `PrefixCache`."""
        return self._loop.call(self._batch.flush)


class FakeEngine:
    """Implements `Engine`.

    Once it hangs on request, `pause`, `install` and `close` hang with it, as they would with a
    stuck device.
    """

    lora = prefixes = scorer = embedder = reranker = None
    shared = checkpointer = profiler = meter = None

    def __init__(self, settings: FakeSettings, sink: StepSink) -> None:
        self.facts = EngineFacts(
            kind="fake",
            vocab_size=FAKE_VOCAB_SIZE,
            max_context=settings.max_context,
            slots=settings.slots,
            eos_token_ids=(FAKE_EOS,),
            features=frozenset({"min_new_tokens", "seed"}),
        )
        batch = FakeBatch(settings)
        self._loop = StepLoop(batch, sink, "fake-engine")
        self._tensors = FakeWeights()
        self.weights = self.overwriter = LiveWeights(self._tensors, batch, self._loop)
        self.memory = FakeMemory(self._loop)
        self.cache = FakeCache(self._loop, batch)

    def generate(self, work: Sequence[Work]) -> None:
        """See `Engine`. A request without a seed has seed 0."""
        self._loop.submit([open_request(w, self.facts, 0) for w in work])

    def abort(self, keys: Sequence[AttemptKey]) -> int:
        """See `Engine`."""
        return self._loop.abort(keys)

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`."""
        self._loop.pause(mode)

    def resume(self) -> None:
        """See `Engine`."""
        self._loop.resume()

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return self._loop.stats()

    def close(self) -> None:
        """See `Engine`."""
        self._loop.close()

    @property
    def content(self) -> Mapping[str, bytes]:
        """Weights that were installed last, zeros before."""
        return self._tensors.content
