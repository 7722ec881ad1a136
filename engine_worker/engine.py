"""What an engine is: it samples tokens, and has parts for what else it can do.

An engine lives in the engine host, a child process of the worker actor. It never sees the bus:
work goes in, columns of each step come out through the sink it was built with. What not every
engine can do is a part of it: having the part is the capability. A command whose part is None ends
with `failed(unsupported)`.

All methods of parts may block, unless they say that they are cheap; they are called off the host's
loop, one at a time of each kind. They raise ValueError or RequestError where something impossible
was asked for, and EngineBusy where the engine's present state forbids it: nothing was changed then.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.messages.control import CacheTier, SaveKind, StartProfile
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Array,
    FinishReason,
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.bus.wire.messages.membership import Prefixes
from rolloutbus.engine_worker.weights.raw_tensor import HandleBook, RawTensor

Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
Float32s = np.ndarray[tuple[int], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Float32Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]

PauseMode = Literal["abort", "in_place", "retract", "drain"]
InFlight = Literal["finish_old", "keep", "retract", "abort"]


class EngineDied(RuntimeError):
    """The engine's thread ended on an error or was closed; only a new engine helps."""


class EngineBusy(RuntimeError):
    """The engine's present state forbids this call; nothing was changed."""


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
    is_made_up: bool = False
    """Its first weights, version 0, are made up: they stand in for those that a trainer brings."""


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
    """A client reads each step; otherwise tokens may come in portions."""
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
    "Arrays". Made by `bus.wire.arrays.array_of`."""
    adapters: Sequence[tuple[int, str]] = ()
    """(row, `NAME@VERSION`) of rows that begin with an adapter: what the engine has given them,
    reported no later than with their first token. See `began_with`."""


def began_with(key: AttemptKey, lora: str) -> Step:
    """Reports that a request begins with the adapter `lora`, a `NAME@VERSION`; it has no tokens."""
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
    n_held: int = 0
    """Of those that wait: what they need is still made, a grammar for example."""


StepSink = Callable[[Step], None]
"""Called once per engine step, from any thread; must not block."""


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


class TensorRange(NamedTuple):
    """Some bytes of one tensor."""

    name: str
    offset: int
    size_bytes: int


class WeightSource(Protocol):
    """Weights that can be read piece by piece while the engine generates."""

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        """The active version, and a copy of the raw bytes of each range: uint8 [size_bytes].

        They are copied between two steps, which wait meanwhile: ask for few bytes at a time.

        Raises:
            ValueError: there is no such tensor, or no such range.
            EngineBusy: the weights are torn.
        """
        ...


class WeightSink(WeightSource, Protocol):
    """Weights that can be replaced while the engine lives."""

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor the engine expects, by name; tied weights once."""
        ...

    def install(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        """Replace all weights between two steps and stamp later steps with `version`.

        `tensors` maps each name of `specs` to its raw little-endian bytes; the engine
        copies them, the caller may reuse the buffers afterwards. New requests never reuse prefix
        blocks of older weights. `finish_old` waits until what runs has ended on the old weights.
        """
        ...

    def stage(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """Prepare an `install` of these tensors beside the steps, to make it shorter.

        The bytes stay as they are until the install, or until `unstage`.

        Raises:
            ValueError: they do not fit, by name.
            EngineFailed: they cannot be had there.
        """
        ...

    def unstage(self, version: int) -> None:
        """Drop a staged version; an `install` of it that waits may be refused. Idempotent."""
        ...

    def give_back_spares(self) -> None:
        """Give back memory of a GPU that is kept for the next version: somebody else needs it."""
        ...


class InPlaceSink(Protocol):
    """Weights that can be overwritten where they lie, without room for a second copy.

    From `begin_overwrite` to `end_overwrite` the engine is torn: it makes no steps. An `install`
    mends it, too; requests that run or wait go on then.
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
        """All tensors now belong to `version`: continue, and stamp later steps with it."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """Bytes released or taken back, per tag."""

    bytes_by_tag: Mapping[str, int] = field(default_factory=dict[str, int])


class MemoryTiers(Protocol):
    """Memory that can be given up while a trainer needs it. Only called while idle."""

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """Release memory tagged `weights`, `kv_cache` or `cuda_graph`; idempotent."""
        ...

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """Take it back. Weights come back with their values, or as garbage: torn then."""
        ...


class PrefixCache(Protocol):
    """Prefixes that the engine keeps the KV of."""

    @property
    def tiers(self) -> Collection[CacheTier]:
        """Tiers that the cache has."""
        ...

    def flush(self, tiers: Sequence[CacheTier]) -> int:
        """Forget what no request uses in these tiers; returns how many tokens, if it is known."""
        ...


class ScoreRows(NamedTuple):
    """What scoring gave."""

    scores: Float32Table
    """float32 [items, labels]: shares, logprobs, or logits of classes."""
    n_prompt_tokens: int
    """Read by the engine in all."""


class Scorer(Protocol):
    """Scores how likely each label token follows a text."""

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> ScoreRows:
        """Score the labels after the query and each item.

        Args:
            query: int32 [q], may be empty.
            items: int32 [m] each, with the query at least one token and within the context.
            label_token_ids: of the vocabulary; none for models that classify.
            apply_softmax: give the labels' shares of their own sum, not their logprobs over the
                whole vocabulary; of a model that classifies: not logits.
            item_first: the item stands before the query.
        """
        ...


class EmbeddingRows(NamedTuple):
    """What embedding gave."""

    rows: Float32Table
    """float32 [inputs, d]."""
    n_prompt_tokens: int
    """Read by the engine in all."""


class Embedder(Protocol):
    """Makes a vector of a text."""

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> EmbeddingRows:
        """One vector for each input, int32 [m], cut to `dimensions` unless that is 0."""
        ...


class Reranker(Protocol):
    """Scores how well a text fits a query."""

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """float32 [pairs]: of each (query, text), higher fits better."""
        ...


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """An adapter in memory, in PEFT's terms."""

    config: Mapping[str, object]
    """The content of its `adapter_config.json`."""
    specs: Sequence[TensorSpec]
    tensors: Mapping[str, RawTensor]
    """Name -> raw little-endian bytes; only valid during the call."""


class LoraHost(Protocol):
    """Low-rank adapters, one for each request."""

    def versions(self) -> Mapping[str, int]:
        """Versions of the loaded adapters, by name; cheap."""
        ...

    def load(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """Load an adapter; new requests that name it get it.

        Requests that run with another version of this name end on that one. To load what is
        loaded already does nothing. `source` is a directory in PEFT's layout, which stays as long
        as the worker lives, or what it would hold.

        Raises:
            ValueError: it is no adapter for this model, or there is no room for it.
        """
        ...

    def unload(self, name: str) -> None:
        """Forget an adapter; may wait for its requests. ValueError: it is not loaded."""
        ...


class Checkpointer(Protocol):
    """Writes the active weights."""

    def save(self, destination: str, kind: SaveKind) -> None:
        """Write the weights of one version into an empty directory, for `remote` to an address.

        `kind`: `safetensors` whole tensors, `sharded` as they lie on the ranks, `remote` through
        the engine's own connector. ValueError: the engine does not write this kind, or there.
        """
        ...


class Profiler(Protocol):
    """Records what the engine does."""

    def start(self, folder: Path, ask: StartProfile) -> None:
        """Begin to record into an empty folder. ValueError: there is no such activity.

        EngineBusy: one is being recorded.
        """
        ...

    def stop(self) -> None:
        """Write the record, or wait until one that has stopped by itself is written.

        EngineBusy: none is being recorded.
        """
        ...


class LoadMeter(Protocol):
    """Measures how busy the engine is, in its own terms."""

    def load(self) -> Mapping[str, float]:
        """Gauges by name, at most 256; cheap."""
        ...


class SharesMemory(Protocol):
    """The model lives in other processes, which can read some memory of this one."""

    @property
    def handles(self) -> HandleBook:
        """Notes GPU memory that is opened here, which those processes open themselves."""
        ...

    def shared_buffer(self, size_bytes: int) -> Bytes:
        """Fresh memory of this kind, uint8: what lies there need not be copied for the model."""
        ...


class PrefixReporter(Protocol):
    """Reports which beginnings of prompts the cache holds."""

    def take(self) -> Prefixes | None:
        """What has changed since the last call, or the oldest part of it; None: nothing.

        Numbered in order; cheap, and called on the host's loop. Only what a new request without
        adapter would find: a change of weights clears it.
        """
        ...


class Engine(Protocol):
    """Samples tokens, and has parts; None: it cannot do what the part is for.

    Its own methods return quickly; pause and close wait for the current step only.
    """

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
        """Cheap; called before every heartbeat."""
        ...

    def close(self) -> None:
        """Stop and free everything."""
        ...

    @property
    def weights(self) -> WeightSink | None:
        """Replaces and reads the weights."""
        ...

    @property
    def overwriter(self) -> InPlaceSink | None:
        """Overwrites the weights where they lie."""
        ...

    @property
    def shared(self) -> SharesMemory | None:
        """Memory that the processes of the model can read."""
        ...

    @property
    def memory(self) -> MemoryTiers | None:
        """Gives memory up for a while."""
        ...

    @property
    def cache(self) -> PrefixCache | None:
        """Forgets cached prefixes."""
        ...

    @property
    def prefixes(self) -> PrefixReporter | None:
        """Reports which prefixes are cached."""
        ...

    @property
    def lora(self) -> LoraHost | None:
        """Holds low-rank adapters."""
        ...

    @property
    def scorer(self) -> Scorer | None:
        """Scores how likely labels are."""
        ...

    @property
    def embedder(self) -> Embedder | None:
        """Makes vectors of texts."""
        ...

    @property
    def reranker(self) -> Reranker | None:
        """Scores how well texts fit a query."""
        ...

    @property
    def checkpointer(self) -> Checkpointer | None:
        """Writes the weights to files."""
        ...

    @property
    def profiler(self) -> Profiler | None:
        """Records what the engine does."""
        ...

    @property
    def meter(self) -> LoadMeter | None:
        """Measures how busy the engine is."""
        ...
