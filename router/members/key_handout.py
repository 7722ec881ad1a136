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

    def changed(self, principals: Iterable[Principal]) -> None:
        """The operator's list is another one: tell every member."""
        keys = handed(principals)
        if keys.stamp == self._stamp:
            return
        self._stamp, self._body = keys.stamp, pack(keys)
        for member in self._context.members:
            self.tell(member)

    def tell(self, member: MemberRecord) -> None:
        """Tell one member, which has been welcomed."""
        if self._stamp and member.hello.protocol[1] >= HANDED_KEYS_VERSION:
            self._context.to_member(member, "allow_list", self._body)

    def heard(self, member: MemberRecord, heartbeat: Heartbeat) -> None:
        """A heartbeat came: send the list again if the member has another one."""
        if heartbeat.keys != self._stamp:
            self.tell(member)
