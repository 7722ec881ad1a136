"""Hands the allow-list to members, who let nobody else connect to what they bind.

Spec: docs/protocol.md, "Security", 14.
"""

from collections.abc import Iterable

from msgspec import Raw

from rolloutbus.bus.security.principals import Principal, handed
from rolloutbus.bus.wire.codec import HANDED_KEYS_VERSION, pack
from rolloutbus.bus.wire.messages.membership import Heartbeat
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord


class KeyHandout:
    """The present allow-list, packed once for all members."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stamp = ""
        """Empty: this router has no keys."""
        self._body = Raw()

    def changed(self, principals: Iterable[Principal], now: float) -> None:
        """The operator's list is another one: tell every member."""
        keys = handed(principals)
        if keys.stamp == self._stamp:
            return
        self._stamp, self._body = keys.stamp, pack(keys)
        for member in self._context.members:
            self.tell(member, now)

    def tell(self, member: MemberRecord, now: float) -> None:
        """Tell one member, which has been welcomed or is to have another list."""
        member.n_keys_sent = 0
        self._send(member, now)

    def heard(self, member: MemberRecord, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat came: send the list again if the member has another one.

        The list may be large, and be on its way for longer than heartbeats take to follow.
        """
        if heartbeat.keys == self._stamp:
            member.n_keys_sent = 0
        elif not member.n_keys_sent or now >= member.keys_again_at:
            self._send(member, now)

    def _send(self, member: MemberRecord, now: float) -> None:
        if self._stamp and member.hello.protocol[1] >= HANDED_KEYS_VERSION:
            member.n_keys_sent += 1
            again_s = self._context.settings.leases.resend_after(member.n_keys_sent)
            member.keys_again_at = now + again_s
            self._context.to_member(member, "allow_list", self._body)
