"""Whoever asked the store for something, so that the answer finds the way back."""

from typing import NamedTuple

from rolloutbus.bus.wire.ids import AttemptKey, Peer


class MemberAsker(NamedTuple):
    """A command that came through the router."""

    key: AttemptKey


class BulkAsker(NamedTuple):
    """A request on the bulk socket."""

    peer: Peer
    rid: str


Asker = MemberAsker | BulkAsker
"""Whoever waits for an answer."""
