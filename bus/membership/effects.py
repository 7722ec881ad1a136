"""What the member core asks of the actor that uses it, besides sending and connecting."""

from dataclasses import dataclass
from typing import NamedTuple

from rolloutbus.bus.actor.effects import Connect, Send, Stop
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import AttemptKey
from rolloutbus.bus.wire.messages.membership import Intent


class Execute(NamedTuple):
    """A command for this member, under its present lease, not seen before: carry it out.

    It ends with one call of `MemberCore.ended`, unless the lease or the execution is taken away.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class StopWork:
    """The lease is over: stop all commands that `Deliveries` does not count as running now."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopSilently:
    """These executions belong to somebody else now: stop them without an ending."""

    keys: list[AttemptKey]


@dataclass(frozen=True, slots=True)
class Heed:
    """The router has told another intent: keep it beyond this process, if there is a place."""

    intent: Intent
    former_fleet: str
    """Identity of the fleet known before, if this is another one; else empty."""


MemberEffect = Send | Connect | Stop | Execute | StopWork | StopSilently | Heed
