"""What else an engine can be asked: scores, vectors, adapters, saved weights, profiles, load.

Spec: docs/protocol.md, "More of an engine".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_KINDS,
    MAX_LABELS,
    MAX_SCORED,
    Column,
    Columns,
    Counters,
    Gauges,
    HeaderText,
    Natural,
    Paths,
    PathText,
    Short,
    Text,
)
from rolloutbus.bus.wire.messages.array import Array

SaveKind = Literal["safetensors", "sharded", "remote"]


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How likely each label token follows a query and an item. Ends with `Scored`."""

    query: Column
    """int32 [q], may be empty."""
    items: Columns
    """int32 [m] each."""
    label_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_LABELS)]
    """Ignored by models that classify."""
    apply_softmax: bool = True
    """Shares of the labels alone; otherwise logprobs, or logits of classes."""
    item_first: bool = False
    """The item stands before the query."""


class Scored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `score`."""

    scores: Array
    """float32 [items, labels]."""
    n_prompt_tokens: Natural


class Embed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector for each input. Ends with `Embedded`."""

    inputs: Columns
    """int32 [m] each."""
    dimensions: Natural = 0
    """Cut vectors to so many, for models made for it; 0: all."""


class Embedded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `embed`."""

    embeddings: Array
    """float32 [inputs, d]."""
    n_prompt_tokens: Natural


class Rerank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well each text fits its query. Ends with `Reranked`."""

    pairs: Annotated[list[tuple[Text, Text]], msgspec.Meta(max_length=MAX_SCORED)]
    """(query, text)."""


class Reranked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `rerank`."""

    scores: Array
    """float32 [pairs], higher fits better."""


class LoadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load an adapter, from files or from the weight store. Ends with `Adapters`."""

    name: Short
    version: Natural = 0
    path: PathText = ""
    """Directory of a PEFT adapter below the worker's `weights_root`; empty: from the store."""
    bulk: HeaderText = ""
    """Where the store serves bytes; needed without a path."""


class UnloadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget an adapter. Ends with `Adapters`."""

    name: Short


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `load_lora` and `unload_lora`: all that are loaded now."""

    adapters: Counters
    """Name -> version."""


class SaveWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write the active weights to a place that the operator has named. Ends with `Saved`."""

    target: Short
    """One of the worker's `save_targets`."""
    name: Short
    """Directory in it."""
    kind: SaveKind


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `save_weights`."""

    path: PathText
    files: Paths
    """Relative to `path`; empty when the engine does not tell."""
    size_bytes: Natural


class StartProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record what the engine does. Ends with `Done`."""

    n_steps: Natural = 0
    """Stop by itself after so many; 0: at `stop_profile`."""
    activities: Annotated[list[Short], msgspec.Meta(max_length=MAX_KINDS)] = msgspec.field(
        default_factory=lambda: ["CPU", "GPU"]
    )
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write the record. Ends with `Profiled`."""


class Profiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `stop_profile`."""

    files: Paths
    """Relative to the worker's `profile_dir`."""


class GetLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read the engine's gauges. Ends with `Load`."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `get_load`; the names are the engine's own."""

    gauges: Gauges
