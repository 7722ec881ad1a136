"""Events that a `Subscriber` yields; `StreamEvent` is any of them."""

from rolloutbus.replay.stream.events import (
    Demoted,
    Finished,
    GapFound,
    GapLost,
    GapRepaired,
    Interrupted,
    LetGo,
    Restored,
    StreamEvent,
    Tokens,
    WorkerJoined,
    WorkerLeft,
)

__all__ = [
    "Demoted",
    "Finished",
    "GapFound",
    "GapLost",
    "GapRepaired",
    "Interrupted",
    "LetGo",
    "Restored",
    "StreamEvent",
    "Tokens",
    "WorkerJoined",
    "WorkerLeft",
]
