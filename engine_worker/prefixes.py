"""Prefix hashes that a cache holds, and which of them its reader does not know yet."""

from rolloutbus.bus.actor.effects import THE_LINK, Send
from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.prefix_hashes import MARK_BYTES, packed, unpacked
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.limits import MAX_MARK_NEWS_BYTES
from rolloutbus.bus.wire.messages.membership import Prefixes

PACE_S = 0.25
"""Between two messages, of 8 KiB at most: heartbeats and endings are not to wait for them."""


class PrefixNews:
    """Reports to the router what the engine host reports; each connection gets everything again."""

    def __init__(self) -> None:
        self._hashes = PrefixHashSet()
        self._greeted_at = 0.0
        self._reported_at = 0.0

    def heard(self, news: Prefixes) -> None:
        """The engine host has reported this."""
        self._hashes.apply(news)

    def host_lost(self) -> None:
        """The engine is gone, and all that it had cached."""
        self._hashes.clear()

    def tick(self, member: MemberCore, now: float) -> list[Send]:
        """Send the next part, if it is time for it."""
        if member.greeted_at != self._greeted_at:
            self._greeted_at = member.greeted_at
            self._hashes.begin_anew()
        if (
            not self._hashes.has_news
            or member.state != "leased"
            or now - self._reported_at < PACE_S
        ):
            return []
        self._reported_at = now
        body = pack(self._hashes.take())
        return [Send(THE_LINK, Entry("prefixes", epoch=member.epoch, body=body))]


MAX_NEWS = MAX_MARK_NEWS_BYTES // MARK_BYTES
"""Hashes in one message."""
MAX_HELD = 16_384
"""As many as a router takes of one worker: beginnings of a million tokens at least."""


class PrefixHashSet:
    """The reader knows what was taken: hashes that come and go in between cost nothing."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._reported: set[int] = set()
        self._news: dict[int, None] = {}
        """Hashes that are held and not reported, or the reverse; the oldest first."""
        self._seq = 0
        self._must_clear = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_news(self) -> bool:
        """Whether the reader lacks anything."""
        return self._must_clear or bool(self._news)

    def add(self, prefix_hash: int) -> None:
        """Hold a hash from now on, unless too many are held."""
        if prefix_hash not in self._held and len(self._held) < MAX_HELD:
            self._held.add(prefix_hash)
            self._changed(prefix_hash)

    def drop(self, prefix_hash: int) -> None:
        """Hold a hash no more."""
        if prefix_hash in self._held:
            self._held.discard(prefix_hash)
            self._changed(prefix_hash)

    def clear(self) -> None:
        """Hold none any more."""
        self._held.clear()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Report everything again: the reader is another one, or has to forget all."""
        self._must_clear |= self._seq > 0
        self._reported.clear()
        self._news = dict.fromkeys(self._held)

    def apply(self, news: Prefixes) -> None:
        """Hold what another set has reported."""
        if not news.seq:
            self.clear()
        for prefix_hash in unpacked(news.removed):
            self.drop(prefix_hash)
        for prefix_hash in unpacked(news.added):
            self.add(prefix_hash)

    def take(self) -> Prefixes:
        """Returns the next message to the reader."""
        if self._must_clear:
            self._seq, self._must_clear = 0, False
        chosen = [prefix_hash for prefix_hash, _ in zip(self._news, range(MAX_NEWS), strict=False)]
        added = [prefix_hash for prefix_hash in chosen if prefix_hash in self._held]
        removed = [prefix_hash for prefix_hash in chosen if prefix_hash not in self._held]
        for prefix_hash in chosen:
            del self._news[prefix_hash]
        self._reported.update(added)
        self._reported.difference_update(removed)
        news = Prefixes(self._seq, packed(added), packed(removed))
        self._seq += 1
        return news

    def _changed(self, prefix_hash: int) -> None:
        if (prefix_hash in self._held) == (prefix_hash in self._reported):
            self._news.pop(prefix_hash, None)
        else:
            self._news[prefix_hash] = None
