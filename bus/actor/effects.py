"""Parts of all cores: what a core may ask its shell to do, and steps in tables of states."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import LocalProtocolError

StateT = TypeVar("StateT", bound=str)
EventT = TypeVar("EventT", bound=str)


def next_state(
    table: Mapping[StateT, Mapping[EventT, StateT]], state: StateT, event: EventT, subject: str
) -> StateT:
    """The state after `event`; the caller keeps it.

    Args:
        table: state -> event -> state.
        state: where the subject stands.
        event: what happened to it.
        subject: whose life it is, for the error: `request c/1`.

    Raises:
        LocalProtocolError: the event has no meaning in this state.
    """
    after = table[state].get(event)
    if after is None:
        raise LocalProtocolError(f"{subject}: {event!r} cannot happen while {state!r}")
    return after


THE_LINK = Peer(b"")
"""The only peer of a core that has one link: its router."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send an entry to a peer; never blocks, may be lost.

    A struct because one is made for every entry that leaves: 70 ns, a NamedTuple takes 400.
    """

    peer: Peer
    entry: Entry


class SendAll(msgspec.Struct, frozen=True, gc=False):
    """Send entries to a peer, in order; never blocks, may be lost. The shell keeps the list."""

    peer: Peer
    entries: list[Entry]


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Publish an entry on the PUB socket under a topic."""

    topic: bytes
    entry: Entry


@dataclass(frozen=True, slots=True)
class Connect:
    """Drop the link, if any, and open a fresh one with a fresh routing id."""

    n_lost: int = 0
    """Links that were lost before. Where there are several routers, each loss leads to the next
    one of the list: the address of number `n_lost`, counted round and round."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: this actor must not go on."""

    reason: str


class ForgetPeer(msgspec.Struct, frozen=True, gc=False):
    """The shell may drop what it keeps about this peer's connection."""

    peer: Peer
