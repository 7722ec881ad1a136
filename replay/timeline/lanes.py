"""What a timeline shows: lanes of spans, in seconds since the beginning of the recording.

Plain values without behaviour; `replay.timeline.timeline` makes them, the renderers draw them.
"""

from typing import Literal

import msgspec

from rolloutbus.bus.wire.entry import Attempt

SpanKind = Literal[
    # of an execution
    "prefill",
    "decode",
    "unsplit",
    "lost",
    # of a worker
    "version",
    "starting",
    "paused",
    "asleep",
    "draining",
    "frozen",
    "torn",
    "broken",
    "gone",
    # of an update
    "pull",
    "commit",
    "stall",
    "publish",
    # of the recording
    "unrecorded",
]
Outcome = Literal["finished", "failed", "cancelled", "expired", "refused", "lost", "fenced", "open"]
NO_VERSION = -1


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that lasted."""

    kind: SpanKind
    start_s: float
    end_s: float
    version: int = NO_VERSION
    """Of the weights that it is about."""
    n_tokens: int = 0
    """`decode`: sampled in it."""
    note: str = ""


class Execution(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at one request, on the worker that it was given to."""

    rid: str
    attempt: Attempt
    row: int
    """Of its lane: executions of one row do not overlap."""
    start_s: float
    """When the router gave it to the worker; without a tap, its first tokens."""
    end_s: float
    outcome: Outcome
    """`open`: no end of it was heard."""
    spans: list[Span]
    """In order, without overlap."""
    n_tokens: int
    """Sampled in this attempt, as far as it was heard."""
    n_prompt_tokens: int = 0
    n_resumed: int = 0
    """Tokens that came from earlier attempts."""
    waited_s: float = 0.0
    """At the router, before."""
    session: str = ""
    group: str = ""
    note: str = ""
    """Finish reason, or why it was lost."""


class WorkerLane(msgspec.Struct, frozen=True):
    """Everything about one worker."""

    name: str
    policy: str
    engine: str
    slots: int
    n_rows: int
    versions: list[Span]
    """Kind `version`: which weights were active when."""
    states: list[Span]
    """Whenever it was not ready: `paused`, …, `gone`."""
    weights: list[Span]
    """`pull`, `commit` and `stall`: overlapping, in this order of depth."""
    executions: list[Execution]
    """In order of their starts."""
    tokens_per_s: list[float]
    """Of each bin."""


class Timeline(msgspec.Struct, frozen=True):
    """A whole recording."""

    began_at: float
    """Unix time of second 0."""
    duration_s: float
    bin_s: float
    """Width of the bins of `waiting` and `tokens_per_s`."""
    lanes: list[WorkerLane]
    """By name, w10 after w9."""
    updates: list[Span]
    """Kind `publish`: one per publication, from the trainer's order to its answer."""
    waiting: list[int]
    """Most requests that waited at the router at once, of each bin."""
    unrecorded: list[Span]
    """While nobody recorded."""
    notes: list[str]
    """What a reader must know: what was measured how, and what is not in the recording."""
