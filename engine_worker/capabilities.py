"""What few engines can do: a protocol for each, and a command that needs it.

All methods may block; they are called off the host's loop, one at a time of each kind. They raise
ValueError or RequestError where something impossible was asked for, and EngineBusy where the
engine's present state forbids it: nothing was changed then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from rolloutbus.bus.wire.messages.control import CacheTier
from rolloutbus.bus.wire.messages.engine import SaveKind, StartProfile
from rolloutbus.bus.wire.messages.prefixes import Prefixes
from rolloutbus.engine_worker.engine import Bytes, Float32s, Int32s, TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.transports.handle_book import HandleBook

Float32Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Scores(NamedTuple):
    """What scoring gave."""

    scores: Float32Table
    """float32 [items, labels]: shares, logprobs, or logits of classes."""
    n_prompt_tokens: int
    """Read by the engine in all."""


@runtime_checkable
class Scorer(Protocol):
    """An engine that tells how likely each label token follows a text."""

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> Scores:
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


class Embeddings(NamedTuple):
    """What embedding gave."""

    rows: Float32Table
    """float32 [inputs, d]."""
    n_prompt_tokens: int
    """Read by the engine in all."""


@runtime_checkable
class Embedder(Protocol):
    """An engine that makes a vector of a text."""

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> Embeddings:
        """One vector for each input, int32 [m], cut to `dimensions` unless that is 0."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """An engine that tells how well a text fits a query."""

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """float32 [pairs]: of each (query, text), higher fits better."""
        ...


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """An adapter in memory, in PEFT's terms."""

    config: Mapping[str, object]
    """What its `adapter_config.json` says."""
    specs: Sequence[TensorSpec]
    tensors: Mapping[str, RawTensor]
    """Name -> raw little-endian bytes; only valid during the call."""


@runtime_checkable
class LoraHost(Protocol):
    """An engine that applies low-rank adapters, one for each request."""

    def adapters(self) -> Mapping[str, int]:
        """Those loaded, and their versions; cheap."""
        ...

    def load_lora(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """Load an adapter; new requests that name it get it.

        Requests that run with another version of this name end on that one. To load what is
        loaded already does nothing.

        Args:
            name: of the adapter.
            version: what `NAME@VERSION` asks for.
            source: a directory in PEFT's layout, which stays as long as the worker lives, or what
                it would hold.

        Raises:
            ValueError: it is no adapter for this model, or there is no room for it.
        """
        ...

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; may wait for requests that use it.

        Raises:
            ValueError: it is not loaded.
        """
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """An engine that writes its active weights."""

    def save_weights(self, destination: str, kind: SaveKind) -> None:
        """Write them; of one version.

        Args:
            destination: an empty directory of this host, or for `remote` an address.
            kind: `safetensors` whole tensors, `sharded` as they lie on the ranks, `remote` through
                the engine's own connector.

        Raises:
            ValueError: the engine does not write this kind, or there.
        """
        ...


@runtime_checkable
class Profiler(Protocol):
    """An engine that records what it does."""

    def start_profile(self, folder: Path, ask: StartProfile) -> None:
        """Begin; what is recorded is to be written into the folder, which is empty.

        Raises:
            EngineBusy: one is being recorded.
            ValueError: there is no such activity.
        """
        ...

    def stop_profile(self) -> None:
        """Write the record, or wait until one that has stopped by itself is written.

        Raises:
            EngineBusy: none is being recorded.
        """
        ...


@runtime_checkable
class LoadMeter(Protocol):
    """An engine that tells how busy it is, in its own terms."""

    def load(self) -> Mapping[str, float]:
        """Gauges by name, at most 256; cheap."""
        ...


@runtime_checkable
class CacheTiers(Protocol):
    """An engine whose prefix cache has more tiers than the device's memory."""

    def flush_tiers(self, tiers: Sequence[CacheTier]) -> int:
        """Forget cached prefixes that no request uses; returns how many tokens, if it can tell.

        Raises:
            ValueError: it has no such tier.
        """
        ...


@runtime_checkable
class Stages(Protocol):
    """An engine that can bring a version near its model before the pause of an update."""

    def stage(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """Do beside the steps whatever an `install` of these tensors need not do; see `WeightSink`.

        The bytes stay as they are until the install, or until `unstage`.

        Raises:
            ValueError: they do not fit, by name.
            EngineFailed: they cannot be had there.
        """
        ...

    def unstage(self, version: int) -> None:
        """Nobody wants the version any more; an `install` that waits may be refused. Idempotent."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """An engine whose model lives in other processes, which can read some memory of this one."""

    @property
    def handles(self) -> HandleBook:
        """Learns of GPU memory that is opened here, which those processes open themselves."""
        ...

    def shared_buffer(self, size_bytes: int) -> Bytes:
        """Fresh memory of this kind, uint8: what lies there need not be copied for the model."""
        ...


@runtime_checkable
class PrefixReporter(Protocol):
    """An engine that tells which beginnings of prompts its cache holds."""

    def take_prefixes(self) -> Prefixes | None:
        """What has changed since the last call, or the oldest part of it; None: nothing.

        Numbered as told; cheap, and called on the host's loop. Only what a new request without
        adapter would find: a change of weights clears it.
        """
        ...
