"""The stream plane: columns of one engine step, and the idle heartbeat that reveals lost tails.

Spec: docs/protocol.md, "Streams".
"""

from typing import Annotated

import msgspec

from rolloutbus.bus.wire.limits import MAX_ITEMS, AttemptIds, Column, Natural, Naturals, Rids
from rolloutbus.bus.wire.messages.generation import FinishReason

Finishes = Annotated[list[tuple[Natural, FinishReason]], msgspec.Meta(max_length=MAX_ITEMS)]
"""[(row, finish_reason)]."""


class Deltas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine step for one subscriber topic, in columns; row i is one request.

    Also what an engine host reports to its actor after each step.
    """

    rids: Rids
    attempts: AttemptIds
    seqs: Naturals
    """Index of each row's first token in its request: contiguous, so a gap shows."""
    counts: Naturals
    """Tokens per row."""
    tokens: Column
    """int32 [sum(counts)]."""
    logprobs: Column
    """float32 [sum(counts)]."""
    versions: Naturals
    """Weight version per row: a row never mixes versions."""
    finishes: Finishes = msgspec.field(default_factory=list[tuple[int, FinishReason]])
    """(row, finish_reason) of rows that are complete."""
    behaviour_logprobs: Column = b""
    """float32 [sum(counts)]; empty: no row truncates. From an engine host NaN is what was not
    measured; it goes no further."""


class Idle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Open streams of a topic and how many tokens each has: a lost tail shows."""

    rids: Rids
    attempts: AttemptIds
    n_tokens: Naturals
