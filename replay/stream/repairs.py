"""Which gaps a subscriber asks workers to close: a bounded number at once, in order, a few times.

Pure. Spec: docs/protocol.md, "Streams".
"""

from typing import NamedTuple

from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from rolloutbus.replay.stream.followed_stream import FollowedStream

MAX_TRIES = 3
"""Of repairs that brought nothing although they might have."""
TRY_AGAIN_S = 0.5
"""Before the second try; then it doubles."""
TRY_AGAIN_MAX_S = 2.0


class AskRepair(NamedTuple):
    """Send this command to this worker; what becomes of it goes to `SubscriberCore.answered`."""

    worker: str
    body: Repair


class Unrepaired(NamedTuple):
    """Why a repair brought nothing."""

    why: str
    is_final: bool
    """To ask again would be in vain."""


Answer = Repaired | Unrepaired


class Repairs:
    """Streams with a gap, under repair or waiting for it."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: dict[FollowedStream, float] = {}
        """-> not before."""
        self._under_way: dict[tuple[str, Attempt], FollowedStream] = {}

    def __contains__(self, stream: FollowedStream) -> bool:
        return stream in self._waiting or (stream.rid, stream.attempt) in self._under_way

    def want(self, stream: FollowedStream, not_before: float = 0.0) -> None:
        """Ask for what this stream lacks, when it is its turn."""
        if stream not in self:
            self._waiting[stream] = not_before

    def drop(self, stream: FollowedStream) -> None:
        """It needs nothing any more."""
        self._waiting.pop(stream, None)
        self._under_way.pop((stream.rid, stream.attempt), None)

    def next(self, now: float) -> list[AskRepair]:
        """What to ask now."""
        asked: list[AskRepair] = []
        n_free = self._at_once - len(self._under_way)
        if n_free <= 0 or not self._waiting:
            return asked
        due = [stream for stream, not_before in self._waiting.items() if not_before <= now]
        for stream in due[:n_free]:
            del self._waiting[stream]
            key = (stream.rid, stream.attempt)
            self._under_way[key] = stream
            gap = stream.assembly.gap
            start = stream.assembly.next if gap is None else gap.start
            asked.append(AskRepair(stream.worker, Repair(*key, start)))
        return asked

    def answered(self, ask: AskRepair) -> FollowedStream | None:
        """This repair has ended; whose it was, if that stream still is in that attempt."""
        stream = self._under_way.pop((ask.body.rid, ask.body.attempt), None)
        if stream is None or stream.attempt != ask.body.attempt:
            return None
        return stream
