"""The stream plane: columns of one engine step, and the idle beat that reveals lost tails.

Spec: docs/protocol.md, "Streams".
"""

import msgspec


class Deltas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine step for one subscriber topic, in columns; row i is one request.

    Also what an engine host reports to its actor after each step.
    """

    rids: list[str]
    attempts: list[tuple[int, int]]
    seqs: list[int]
    """Index of each row's first token in its request: contiguous, so a gap shows."""
    counts: list[int]
    """Tokens per row."""
    tokens: bytes
    """int32 [sum(counts)]."""
    logprobs: bytes
    """float32 [sum(counts)]."""
    versions: list[int]
    """Weight version per row: a row never mixes versions."""
    finishes: list[tuple[int, str]] = msgspec.field(default_factory=list[tuple[int, str]])
    """(row, finish_reason) of rows that are complete."""
    behaviour_logprobs: bytes = b""
    """float32 [sum(counts)]; empty when no row truncates."""


class Idle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Open streams of a topic and how many tokens each has: a lost tail shows."""

    rids: list[str]
    attempts: list[tuple[int, int]]
    n_tokens: list[int]
