"""Events for a subscriber: tokens, gaps, and changes of the subscriber's own mode.

Arrays are read-only. Indices count the tokens of a request, from its first one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.messages.generation import FinishReason, VersionRuns
from rolloutbus.bus.wire.near_names import no_attribute
from rolloutbus.trainer_adapter.client.core.results import Float32s, Int32s

Cause = Literal["reader", "socket"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of a stream, all of one weight version."""

    rid: str
    attempt: Attempt
    worker: str
    start: int
    """Where the last ended, except after a `GapLost`, or when lost work was sampled anew: what was
    told from `start` on is then void."""
    tokens: Int32s
    """int32 [k]."""
    logprobs: Float32s
    """float32 [k]."""
    behaviour_logprobs: Float32s
    """float32 [k]."""
    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A stream has ended; no more events follow for this attempt."""

    rid: str
    attempt: Attempt
    worker: str
    """Of the last tokens."""
    finish_reason: FinishReason | None
    """None: its last row was missed, so that more tokens may have come. After `abort` the request
    may go on elsewhere, and is then told from its first token, under a later attempt."""
    tokens: Int32s
    """int32 [n]: all that is held, in order."""
    logprobs: Float32s
    """float32 [n]."""
    behaviour_logprobs: Float32s
    """float32 [n]."""
    version_runs: VersionRuns
    """[(version, n_tokens)] of these."""
    n_missing: int
    """Tokens that were lost: those of its `GapLost`."""

    if not TYPE_CHECKING:  # a type checker knows without it that there is none

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name, {"versions": "version_runs"})


@dataclass(frozen=True, slots=True)
class _Gap:
    rid: str
    attempt: Attempt
    worker: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GapFound(_Gap):
    """Tokens [start, stop) did not come; the worker is asked for them."""


@dataclass(frozen=True, slots=True)
class GapRepaired(_Gap):
    """The missing tokens have arrived; the next `Tokens` event holds them."""


@dataclass(frozen=True, slots=True)
class GapLost(_Gap):
    """They will not come; the stream goes on at `stop`."""

    why: str


@dataclass(frozen=True, slots=True)
class Demoted:
    """From now on the reader gets results only: `Finished` with all tokens, nothing before it."""

    cause: Cause
    """`reader`: it does not take what is told. `socket`: more messages waited than one may be sure
    that none was lost; streams that began and ended meanwhile may have been missed as a whole."""
    n_waiting_bytes: int
    """What waited for the reader."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The reader gets tokens again; open streams continue where they stopped."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """The oldest streams were dropped to make room; no more events follow for them."""

    n_streams: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Connections to publishers broke; what they sent until the next ones stood is missed.

    Gaps of streams that go on are repaired; those that began and ended meanwhile are not known of.
    """

    n_connections: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is followed."""

    worker: str
    epoch: str
    policy: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The router does not list it any more; what it still publishes is heard for a while."""

    worker: str
    epoch: str


StreamEvent = (
    Tokens
    | Finished
    | GapFound
    | GapRepaired
    | GapLost
    | Demoted
    | Restored
    | LetGo
    | Interrupted
    | WorkerJoined
    | WorkerLeft
)
