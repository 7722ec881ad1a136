"""Effects of the worker core besides those that every actor has."""

from dataclasses import dataclass
from typing import NamedTuple

from rolloutbus.bus.actor.effects import Connect, Publish, Send, Stop
from rolloutbus.bus.membership.deliveries import Heed, LetIn
from rolloutbus.bus.wire.entry import Entry


class ToHost(NamedTuple):
    """Send an entry to the engine host; dropped if there is none."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class StartHost:
    """Start an engine host; its end is reported by `WorkerCore.host_exited`."""


@dataclass(frozen=True, slots=True)
class KillHost:
    """Kill the engine host; its end is reported as any other."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellProgress:
    """Tell people what this worker does until it is ready."""

    doing: str


WorkerEffect = (
    Send | Publish | Connect | Stop | ToHost | StartHost | KillHost | Heed | LetIn | TellProgress
)
