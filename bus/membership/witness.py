"""What a peer knows of the life of its own router: when it answered, and to a beat sent when.

A router begins after its predecessor has ended. So whoever holds an answer to a beat that was sent
after another router had begun knows that there are two. Spec: docs/protocol.md, "Two routers".
"""

REMEMBERED_BEATS = 32


class Witness:
    """Numbers beats, and remembers the latest that was answered by the router obeyed."""

    def __init__(self) -> None:
        self._seq = 0
        self._sent_at: dict[int, float] = {}
        self._alive_at = float("-inf")

    def beat(self, now: float) -> int:
        """Number of the beat that is being sent."""
        self._seq += 1
        self._sent_at[self._seq] = now
        self._sent_at.pop(self._seq - REMEMBERED_BEATS, None)
        return self._seq

    def answered(self, seq: int) -> float | None:
        """The router obeyed answers beat `seq`; when that was sent, None if it is forgotten.

        The time of sending counts: the answer may have lain unread for long.
        """
        sent_at = self._sent_at.get(seq)
        if sent_at is not None and sent_at > self._alive_at:
            self._alive_at = sent_at
        return sent_at

    def has_outlived(self, up_s: float, now: float) -> bool:
        """Whether our router lived after one began that has been running for `up_s` seconds."""
        return self._alive_at > now - up_s

    def silence_s(self, now: float) -> float:
        """Since our router was last known to live."""
        return now - self._alive_at

    def rebound(self) -> None:
        """Another router is obeyed from now on: nothing is known of it yet."""
        self._alive_at = float("-inf")
