"""Marks that are held, and what one reader of them has not been told yet."""

from rolloutbus.bus.actor.effects import THE_LINK, Send
from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.prefix_hashes import MARK_BYTES, packed, unpacked
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.limits import MAX_MARK_NEWS_BYTES
from rolloutbus.bus.wire.messages.prefixes import Prefixes

PACE_S = 0.25
"""Between two messages, of 8 KiB at most: heartbeats and endings are not to wait for them."""


class PrefixNews:
    """Hears the engine host, tells the router; each connection to it gets everything again."""

    def __init__(self) -> None:
        self._book = PrefixHashSet()
        self._greeted_at = 0.0
        self._told_at = 0.0

    def heard(self, news: Prefixes) -> None:
        """The engine host says this."""
        self._book.hear(news, unpacked(news.added), unpacked(news.removed))

    def host_lost(self) -> None:
        """The engine is gone, and all that it had."""
        self._book.clear()

    def tick(self, member: MemberCore, now: float) -> list[Send]:
        """Time passes: say the next part, if it is time for it."""
        if member.greeted_at != self._greeted_at:
            self._greeted_at = member.greeted_at
            self._book.begin_anew()
        if not self._book.has_news or member.state != "leased" or now - self._told_at < PACE_S:
            return []
        self._told_at = now
        body = pack(self._book.take())
        return [Send(THE_LINK, Entry("prefixes", epoch=member.epoch, body=body))]


MAX_NEWS = MAX_MARK_NEWS_BYTES // MARK_BYTES
"""Marks in one message."""
MAX_HELD = 16_384
"""As many as a router takes of one worker: beginnings of a million tokens at least."""


class PrefixHashSet:
    """What the reader knows is what was taken: marks that come and go in between cost nothing."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._told: set[int] = set()
        self._news: dict[int, None] = {}
        """Marks that are held and not told, or the reverse; the oldest first."""
        self._seq = 0
        self._must_clear = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_news(self) -> bool:
        """Whether the reader lacks anything."""
        return self._must_clear or bool(self._news)

    def add(self, mark: int) -> None:
        """It is held from now on, unless too many are."""
        if mark not in self._held and len(self._held) < MAX_HELD:
            self._held.add(mark)
            self._changed(mark)

    def drop(self, mark: int) -> None:
        """It is held no more."""
        if mark in self._held:
            self._held.discard(mark)
            self._changed(mark)

    def clear(self) -> None:
        """None is held any more."""
        self._held.clear()
        self.begin_anew()

    def begin_anew(self) -> None:
        """The reader is another one, or has to forget all."""
        self._must_clear |= self._seq > 0
        self._told.clear()
        self._news = dict.fromkeys(self._held)

    def hear(self, told: Prefixes, added: tuple[int, ...], removed: tuple[int, ...]) -> None:
        """Hold what another book tells."""
        if not told.seq:
            self.clear()
        for mark in removed:
            self.drop(mark)
        for mark in added:
            self.add(mark)

    def take(self) -> Prefixes:
        """The next message to the reader."""
        if self._must_clear:
            self._seq, self._must_clear = 0, False
        chosen = [mark for mark, _ in zip(self._news, range(MAX_NEWS), strict=False)]
        added = [mark for mark in chosen if mark in self._held]
        removed = [mark for mark in chosen if mark not in self._held]
        for mark in chosen:
            del self._news[mark]
        self._told.update(added)
        self._told.difference_update(removed)
        told = Prefixes(self._seq, packed(added), packed(removed))
        self._seq += 1
        return told

    def _changed(self, mark: int) -> None:
        if (mark in self._held) == (mark in self._told):
            self._news.pop(mark, None)
        else:
            self._news[mark] = None
