"""Events for a subscriber's reader: which comes next, and how many, by the reader's speed.

Pure. What waits is not a queue of events but the streams themselves, so a slow reader gets fewer
and larger pieces. When too much waits it is demoted: it is told the results of streams only, until
it has taken all of them.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.stream.events import Cause, Demoted, LetGo, Restored, StreamEvent
from rolloutbus.replay.stream.followed_stream import FollowedStream

MIB = 1 << 20


class SubscriberSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes are of tokens and logprobs, 8 per token, and 1 KiB for each stream."""

    waiting_bytes: int = 8 * MIB
    """Above this, the reader is too slow and gets results only."""
    unread_messages: int = 9_900
    """So many messages were read from the socket without a pause: the same. A socket holds a few
    more of each publisher before that drops what comes."""
    held_bytes: int = 512 * MIB
    """Of all streams; beyond, the oldest are let go."""
    is_restored: bool = True
    """Resume tokens when the reader has taken all that waited; otherwise when the reader asks."""
    repairs_at_once: int = 16
    """More gaps wait for their turn: repairs pass through the router."""

    def __post_init__(self) -> None:
        if min(self.waiting_bytes, self.unread_messages, self.repairs_at_once) < 1:
            raise SettingsError("bounds of a subscriber must be at least 1")
        if self.held_bytes < self.waiting_bytes:
            raise SettingsError("held_bytes must be at least waiting_bytes")


MAX_NEWS = 10_000
"""Limit of queued events that belong to no stream; later ones are dropped."""
TOKEN_BYTES = 8
"""A token and its logprob."""
STREAM_BYTES = 1024


class EventQueue:
    """Events of all streams for the reader, until it has received each stream's end."""

    def __init__(self, settings: SubscriberSettings) -> None:
        self._settings = settings
        self.is_live = True
        """Tokens are told as they come, not only results."""
        self.n_dropped = 0
        """News for which there was no room."""
        self._causes: set[Cause] = set()
        self._news: deque[StreamEvent] = deque()
        self._next: deque[StreamEvent] = deque()
        """Of the stream whose turn it is."""
        self._ready: dict[FollowedStream, None] = {}
        self._all: dict[FollowedStream, None] = {}
        self.n_held_bytes = 0
        """Of all streams."""
        self.n_waiting_bytes = 0
        """Of tokens that the reader could take now."""
        self._let_go: LetGo | None = None

    def say(self, event: StreamEvent) -> None:
        """Queues an event that belongs to no stream."""
        if len(self._news) < MAX_NEWS:
            self._news.append(event)
        else:
            self.n_dropped += 1

    def changed(self, stream: FollowedStream) -> None:
        """A stream has more to tell, or has ended."""
        self._weigh(stream)
        if stream.n_waiting_bytes:
            self._ready[stream] = None
            if self.is_live and self.n_waiting_bytes > self._settings.waiting_bytes:
                self.demote("reader")

    def forget(self, stream: FollowedStream) -> None:
        """Drops a stream: the reader gets no more events of it."""
        self._all.pop(stream, None)
        self._ready.pop(stream, None)
        self.n_held_bytes -= stream.n_held_bytes
        self.n_waiting_bytes -= stream.n_waiting_bytes
        stream.n_held_bytes = stream.n_waiting_bytes = 0

    def oldest_to_let_go(self) -> FollowedStream | None:
        """Drops and returns the oldest stream if too many bytes are held; otherwise None."""
        if self.n_held_bytes <= self._settings.held_bytes or not self._all:
            return None
        oldest = next(iter(self._ready), None) or next(iter(self._all))
        before = self._let_go or LetGo(0, 0)
        self._let_go = LetGo(before.n_streams + 1, before.n_tokens + oldest.n_held)
        self.forget(oldest)
        return oldest

    def demote(self, cause: Cause) -> None:
        """Reports results only from now on."""
        if cause in self._causes:
            return
        self._news.appendleft(Demoted(cause, self.n_waiting_bytes))
        self._causes.add(cause)
        self.is_live = False
        self._ready = {stream: None for stream in self._ready if stream.is_ended}
        self._weigh_all()

    def restore(self) -> None:
        """Reports tokens again; tokens held back do not count as waiting."""
        if self.is_live:
            return
        self.is_live = True
        self._causes.clear()
        self._news.append(Restored())
        for stream in self._all:
            if not stream.is_ended and not stream.is_hidden:
                stream.n_excused = stream.n_untold
                if stream.n_untold:
                    self._ready[stream] = None
        self._weigh_all()

    def take(self, n_unread: int) -> StreamEvent | None:
        """The next event, or None. `n_unread`: messages that the socket gave without a pause."""
        while True:
            if self._next:
                return self._next.popleft()
            if self._let_go is not None:
                told, self._let_go = self._let_go, None
                return told
            if self._news:
                return self._news.popleft()
            if self._ready:
                stream = next(iter(self._ready))
                del self._ready[stream]
                self._next.extend(self._said_by(stream))
            elif self._may_be_restored(n_unread):
                self.restore()
            else:
                return None

    def _may_be_restored(self, n_unread: int) -> bool:
        settings = self._settings
        return not self.is_live and settings.is_restored and n_unread < settings.unread_messages

    def _said_by(self, stream: FollowedStream) -> Iterable[StreamEvent]:
        said: list[StreamEvent] = [*(stream.read() if self.is_live else stream.holes())]
        stream.n_excused = 0
        if stream.is_ended:
            said.append(stream.result())
            self.forget(stream)
        else:
            self._weigh(stream)
        return said

    def _weigh_all(self) -> None:
        for stream in self._all:
            self._weigh(stream)

    def _weigh(self, stream: FollowedStream) -> None:
        if not stream.n_held_bytes:
            self._all[stream] = None
        n_held = TOKEN_BYTES * stream.n_held + STREAM_BYTES
        n_waiting = 0
        if stream.is_hidden:
            pass
        elif self.is_live:
            n_waiting = TOKEN_BYTES * max(0, stream.n_untold - stream.n_excused)
            n_waiting += STREAM_BYTES * stream.is_ended
        elif stream.is_ended:
            n_waiting = n_held
        self.n_held_bytes += n_held - stream.n_held_bytes
        self.n_waiting_bytes += n_waiting - stream.n_waiting_bytes
        stream.n_held_bytes, stream.n_waiting_bytes = n_held, n_waiting
