"""Events and effects of a core as a journal keeps them, and a core that is made to repeat them.

Only where a journal was asked for.
Spec: docs/journal.md, "Turns".
"""

from random import Random
from typing import Protocol, assert_never

import msgspec

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.streams.tap import Outcome, Stimulus, crash_of, outcome_of
from rolloutbus.bus.wire.entry import Peer
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import (
    Counted,
    Effect,
    Event,
    Handle,
    KeysChanged,
    LettersKept,
    Malformed,
    Received,
    Returned,
    Revoked,
    Ticked,
)
from rolloutbus.router.settings import RouterSettings


class TurnLog(Protocol):
    """Keeps the turns of a core; it never waits and never raises."""

    def began(self, settings: RouterSettings, instance: str, tap: str) -> None:
        """A core that knows nothing yet; its settings have a seed."""
        ...

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """Keeps one event of the core, and the effects that it returned."""
        ...


def recorded(handle: Handle, log: TurnLog) -> Handle:
    """The same decisions, each of which is kept with what led to it."""

    def handle_and_keep(event: Event, now: float) -> list[Effect]:
        stimulus = stimulus_of(event, now)
        try:
            effects = handle(event, now)
        except Exception as error:  # the turn that is wanted most
            log.turn(stimulus, crash_of(error))
            raise
        # At once: the port that the effects go to goes on to fill their lists.
        log.turn(stimulus, outcome_of(effects))
        return effects

    return handle_and_keep


def core_of(settings: RouterSettings, instance: str, tap: str = "") -> RouterCore:
    """Makes a new core from what `TurnLog.began` has recorded."""
    core = RouterCore(settings, instance, Random(settings.seed))  # noqa: S311 - chooses workers, keeps no secret
    core.context.tap = tap
    return core


def repeat(handle: Handle, stimulus: Stimulus) -> Outcome:
    """Hands a core the recorded event of another core.

    Raises:
        msgspec.DecodeError: the stimulus should name a principal, and does not.
        SettingsError: it names one that cannot be.
    """
    event = event_of(stimulus)
    try:
        return outcome_of(handle(event, stimulus.at))
    except Exception as error:  # noqa: BLE001 - what a core raises is its outcome
        return crash_of(error)


def stimulus_of(event: Event, now: float) -> Stimulus:
    """An event as a journal keeps it."""
    match event:
        case Received(peer, entries, None):
            return Stimulus("received", now, [peer], entries)
        case Received(peer, entries, principal, host):
            who = msgspec.json.encode(principal).decode()
            return Stimulus("signed", now, [peer], entries, who, host=host)
        case Returned(peer, entries):
            return Stimulus("undelivered", now, [peer], entries)
        case Malformed(peer):
            return Stimulus("malformed", now, [peer])
        case Revoked(peers, code):
            return Stimulus("revoked", now, [*peers], text=code)
        case Ticked():
            return Stimulus("tick", now)
        case Counted(counter, n):
            return Stimulus("counted", now, text=counter, count=n)
        case LettersKept():
            return Stimulus("letters", now)
        case KeysChanged(principals):
            return Stimulus("keys", now, text=msgspec.json.encode(principals).decode())
        case _:
            assert_never(event)


def event_of(stimulus: Stimulus) -> Event:
    """What a journal has kept; raises as `repeat`."""
    entries, text = stimulus.entries, stimulus.text
    peers = [Peer(each) for each in stimulus.peers]
    peer = peers[0] if peers else Peer(b"")
    match stimulus.event:
        case "received":
            return Received(peer, entries)
        case "signed":
            principal = msgspec.json.decode(text, type=Principal)
            return Received(peer, entries, principal, stimulus.host)
        case "undelivered":
            return Returned(peer, entries)
        case "malformed":
            return Malformed(peer)
        case "revoked":
            return Revoked(peers, text)
        case "tick":
            return Ticked()
        case "counted":
            return Counted(text, stimulus.count)
        case "letters":
            return LettersKept()
        case "keys":
            return KeysChanged(msgspec.json.decode(text, type=list[Principal]))
        case _:
            assert_never(stimulus.event)
