"""What an engine must be able to do: narrow protocols that the engine host drives.

What few engines can do is in `engine_worker.capabilities`.

An engine lives in the engine host, a child process of the worker actor. It never sees the bus:
work goes in, columns of each step come out through the sink it was built with. A capability
(weights, memory tiers, …) is a protocol of its own; a command whose protocol the engine lacks
ends with `failed(unsupported)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rolloutbus.bus.wire.ids import AttemptKey
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    FinishReason,
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
Float32s = np.ndarray[tuple[int], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

PauseMode = Literal["abort", "in_place", "retract", "drain"]
InFlight = Literal["finish_old", "keep", "retract", "abort"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What callers may rely on for the engine's whole life."""

    kind: str
    vocab_size: int
    max_context: int
    """Prompt + new tokens of one request, at most."""
    slots: int
    """Requests that run side by side."""
    eos_token_ids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that hold its weights, as nvidia-smi shows them."""
    features: frozenset[str] = frozenset()
    """What a `generate` may ask for besides the rest of `SamplingParams`; see docs/protocol.md,
    "Generation". Requests that ask for more never reach the engine."""
    parallel: Mapping[str, int] = field(default_factory=dict[str, int])
    """`tp`, `pp`, `dp`, `ep`: over how many ranks the model is split."""
    software: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name -> version of what the engine is made of."""
    lost: Mapping[str, str] = field(default_factory=dict[str, str])
    """Features that what is installed cannot carry, and why. `processor:*`: all processors."""
    lacks: frozenset[str] = frozenset()
    """Kinds of commands that its class knows and it cannot do, for its model or its settings."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request for the engine, already validated against `EngineFacts`."""

    key: AttemptKey
    prompt: Int32s
    """int32 [n_prompt_tokens]."""
    sampling: SamplingParams
    prefix: Prefix | None = None
    """Tokens to go on after; they count towards max_new_tokens, penalties and the seed position."""
    stream: bool = False
    """Somebody wants each step; otherwise tokens may come in portions."""
    lora: str = ""
    """Adapter, `NAME` or `NAME@VERSION`, loaded when it was checked; empty: none."""
    want: Want = NOTHING_MORE
    """What to put into `Step.arrays` when it finishes."""
    grammar: Grammar | None = None
    processors: Sequence[Processor] = ()
    """In this order."""
    media: Sequence[Media] = ()
    priority: int = 0
    """-100..100, higher goes first; of use to engines with the feature `priority`."""
    session: str = ""
    """Requests of one session share their history; empty: none."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step in columns; row i belongs to keys[i].

    A request that was aborted or failed appears once more with its finish and count 0.
    """

    keys: Sequence[AttemptKey]
    counts: Sequence[int]
    tokens: Int32s
    """int32 [sum(counts)]."""
    logprobs: Float32s
    """float32 [sum(counts)]: log-softmax after penalties, temperature, before truncation; NaN: not
    measured."""
    version: int
    """The weights that computed this step's logits."""
    finishes: Sequence[tuple[int, FinishReason]] = ()
    """(row, reason)."""
    behaviour_logprobs: Float32s | None = None
    """float32 [sum(counts)], renormalised over the sampled support; NaN: not measured. None: no row
    truncates."""
    problems: Sequence[tuple[int, Problem]] = ()
    """(row, why) of requests that the engine gave up: their end instead of a finish."""
    arrays: Sequence[tuple[int, Mapping[str, Array]]] = ()
    """(row, name -> array) of rows that finish: what their `want` asked for; see docs/protocol.md,
    "Arrays". Made by `bus.arrays.array_of`."""
    adapters: Sequence[tuple[int, str]] = ()
    """(row, `NAME@VERSION`) of rows that begin with an adapter: what the engine has given them,
    told no later than with their first token. See `began_with`."""


def began_with(key: AttemptKey, lora: str) -> Step:
    """The step before the first one of a request with the adapter `lora`, a `NAME@VERSION`."""
    nothing, no_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Step([key], [0], nothing, no_logprobs, version=0, adapters=((0, lora),))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges at one moment."""

    steps: int
    """Grows with each engine step: the progress signal."""
    n_running: int
    n_waiting: int
    n_kv_tokens: int
    """Tokens held in the KV cache."""
    version: int
    n_calls: int
    """Pauses, swaps and the like that wait for the current step to end."""
    is_torn: bool = False
    """Its weights are of no version: being overwritten, or half overwritten. It makes no steps."""


StepSink = Callable[[Step], None]
"""Called once per engine step, from any thread; must not block."""


class Engine(Protocol):
    """Samples tokens. Methods return quickly; pause and close wait for the current step only."""

    @property
    def facts(self) -> EngineFacts:
        """Fixed properties, known once the engine is built."""
        ...

    def generate(self, work: Sequence[Work]) -> None:
        """Queue requests; their tokens come through the sink."""
        ...

    def abort(self, keys: Sequence[AttemptKey]) -> int:
        """Stop exactly these requests; each ends with `abort` in a step. Returns how many."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop between two steps. Idempotent; returns when no step runs any more.

        `abort` ends everything; `in_place` keeps the KV cache; `retract` drops the KV cache and
        recomputes it on resume; `drain` lets running requests finish first (new ones wait).
        """
        ...

    def resume(self) -> None:
        """Go on after a pause. Idempotent."""
        ...

    def stats(self) -> EngineStats:
        """Cheap; called before every beat."""
        ...

    def close(self) -> None:
        """Stop and free everything."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named weight. `dtype` is the safetensors name: F32, BF16, F16, …."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightSwap:
    """What an update cost the requests that were running."""

    version: int
    stall_ms: float
    """From the last step before the swap to the moment steps may run again."""
    n_retracted: int = 0
    n_aborted: int = 0


@runtime_checkable
class WeightSink(Protocol):
    """An engine whose weights can be replaced while it lives."""

    def weight_specs(self) -> Sequence[TensorSpec]:
        """Every tensor the engine expects, by name; tied weights once."""
        ...

    def install(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        """Replace all weights between two steps and stamp later steps with `version`.

        `tensors` maps each name of `weight_specs` to its raw little-endian bytes; the engine
        copies them, the caller may reuse the buffers afterwards. New requests never reuse prefix
        blocks of older weights. `finish_old` waits until what runs has ended on the old weights.
        """
        ...


class TensorRange(NamedTuple):
    """Some bytes of one tensor."""

    name: str
    offset: int
    size_bytes: int


@runtime_checkable
class WeightSource(Protocol):
    """An engine whose weights can be read piece by piece while it generates."""

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        """The active version, and a copy of the raw bytes of each range: uint8 [size_bytes].

        They are copied between two steps, which wait meanwhile: ask for few bytes at a time.

        Raises:
            ValueError: there is no such tensor, or no such range.
            EngineBusy: the weights are torn.
        """
        ...


@runtime_checkable
class InPlaceSink(Protocol):
    """An engine whose weights can be overwritten where they lie, without room for a second copy.

    From `begin_overwrite` to `end_overwrite` it is torn: it makes no steps. An `install` mends it,
    too; requests that run or wait go on then.
    """

    def begin_overwrite(self, in_flight: InFlight) -> None:
        """Stop between two steps and do with running requests as asked; see `WeightSink`."""
        ...

    def overwrite(self, name: str, offset: int, raw: RawTensor) -> None:
        """Write bytes over a tensor's, from `offset` on; only while torn.

        Raises:
            ValueError: there is no such tensor, or no such range.
        """
        ...

    def overwritten(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """Copy of what a tensor holds now, uint8 [size_bytes]; only while torn."""
        ...

    def end_overwrite(self, version: int) -> WeightSwap:
        """All tensors are those of `version`: go on, and stamp later steps with it."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """Bytes released or taken back, per tag."""

    bytes_by_tag: Mapping[str, int] = field(default_factory=dict[str, int])


@runtime_checkable
class MemoryTiers(Protocol):
    """An engine that can give memory back while a trainer needs it. Only called while idle."""

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """Release memory tagged `weights`, `kv_cache` or `cuda_graph`; idempotent."""
        ...

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """Take it back. Weights come back with their values, or as garbage: it is torn then."""
        ...


@runtime_checkable
class PrefixCache(Protocol):
    """An engine with a prefix cache."""

    def flush_cache(self) -> int:
        """Forget cached prefixes that no request uses; returns how many tokens."""
        ...
