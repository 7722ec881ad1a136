"""What a worker tells its router of the prefixes that its engine has cached: little, and slowly.

Spec: docs/protocol.md, "Prefix affinity".
"""

from rolloutbus.bus.actor.effects import THE_LINK, Send
from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.prefix_hashes import unpacked
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.prefixes import Prefixes
from rolloutbus.engine_worker.prefix_hash_set import PrefixHashSet

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
