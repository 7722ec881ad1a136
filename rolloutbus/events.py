"""What a `Subscriber` yields; `StreamEvent` is any of it: `replay.following.stream_events`."""

from rolloutbus.replay.following.stream_events import (
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
