"""Life cycles are tables; this takes one step in any of them."""

from collections.abc import Mapping
from typing import TypeVar

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
