"""A core whose turns are told to whoever keeps them, and a core that is made to repeat them.

It stands between the shell and the core, and only where a journal was asked for.
Spec: docs/journal.md, "Turns".
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

import msgspec

from rolloutbus.bus.actor.stimulus import Outcome, Stimulus, crash_of, outcome_of
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import Peer
from rolloutbus.router.context import Context
from rolloutbus.router.core import RouterCore
from rolloutbus.router.decider import Decider
from rolloutbus.router.health.dead_letter import DeadLetter
from rolloutbus.router.outgoing import Effect
from rolloutbus.router.settings import RouterSettings


class TurnLog(Protocol):
    """Keeps what it is told; it never waits and never raises."""

    def began(self, settings: RouterSettings, instance: str, tap: str) -> None:
        """A core that knows nothing yet; its settings have a seed."""
        ...

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """What this core was told, and what it wanted."""
        ...


class RecordedCore:
    """The core's own events, each of which is told with its effects."""

    def __init__(self, core: Decider, log: TurnLog) -> None:
        self._core = core
        self._log = log
        self._at = 0.0
        """When the core was last told the time."""

    @property
    def context(self) -> Context:
        """The core's tables."""
        return self._core.context

    def receive(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.receive`."""
        return self._turn(
            Stimulus("received", now, [peer], entries),
            lambda: self._core.receive(peer, entries, now),
        )

    def receive_signed(
        self, peer: Peer, principal: Principal, entries: list[Entry], now: float
    ) -> list[Effect]:
        """See `RouterCore.receive_signed`."""
        who = msgspec.json.encode(principal).decode()
        return self._turn(
            Stimulus("signed", now, [peer], entries, who),
            lambda: self._core.receive_signed(peer, principal, entries, now),
        )

    def undelivered(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.undelivered`."""
        return self._turn(
            Stimulus("undelivered", now, [peer], entries),
            lambda: self._core.undelivered(peer, entries, now),
        )

    def malformed(self, peer: Peer, now: float) -> list[Effect]:
        """See `RouterCore.malformed`."""
        return self._turn(
            Stimulus("malformed", now, [peer]), lambda: self._core.malformed(peer, now)
        )

    def revoked(self, peers: Iterable[Peer], code: str, now: float) -> list[Effect]:
        """See `RouterCore.revoked`."""
        those = list(peers)
        return self._turn(
            Stimulus("revoked", now, [*those], text=code),
            lambda: self._core.revoked(those, code, now),
        )

    def tick(self, now: float) -> list[Effect]:
        """See `RouterCore.tick`."""
        return self._turn(Stimulus("tick", now), lambda: self._core.tick(now))

    def count(self, name: str, by: int) -> None:
        """What the shell has seen; see `Context.count`."""
        self.context.count(name, by)
        self._log.turn(Stimulus("counted", self._at, text=name, count=by), Outcome([]))

    def take_dead_letters(self) -> list[DeadLetter]:
        """See `RouterCore.take_dead_letters`."""
        letters = self._core.take_dead_letters()
        if letters:  # taking none changes nothing
            self._log.turn(Stimulus("letters", self._at), Outcome([]))
        return letters

    def _turn(self, stimulus: Stimulus, handle: Callable[[], Sequence[Effect]]) -> list[Effect]:
        self._at = stimulus.at
        try:
            effects = [*handle()]
        except Exception as error:  # the turn that is wanted most
            self._log.turn(stimulus, crash_of(error))
            raise
        # At once: the port that the effects go to goes on to fill their lists.
        self._log.turn(stimulus, outcome_of(effects))
        return effects


def core_of(settings: RouterSettings, instance: str, tap: str = "") -> RouterCore:
    """A core that knows nothing yet, as `TurnLog.began` is told of it."""
    core = RouterCore(settings, instance, Random(settings.seed))  # noqa: S311 - chooses workers, keeps no secret
    core.context.tap = tap
    return core


def repeat(core: Decider, stimulus: Stimulus) -> Outcome:
    """Tell a core what another one was told.

    Raises:
        msgspec.DecodeError: the stimulus should name a principal, and does not.
        SettingsError: it names one that cannot be.
    """
    tell = _telling(core, stimulus)
    try:
        return outcome_of(tell())
    except Exception as error:  # noqa: BLE001 - what a core raises is its outcome
        return crash_of(error)


def _telling(core: Decider, stimulus: Stimulus) -> Callable[[], Sequence[Effect]]:
    entries, now, text = stimulus.entries, stimulus.at, stimulus.text
    peers = [Peer(each) for each in stimulus.peers]
    peer = peers[0] if peers else Peer(b"")
    match stimulus.event:
        case "received":
            return lambda: core.receive(peer, entries, now)
        case "signed":
            principal = msgspec.json.decode(text, type=Principal)
            return lambda: core.receive_signed(peer, principal, entries, now)
        case "undelivered":
            return lambda: core.undelivered(peer, entries, now)
        case "malformed":
            return lambda: core.malformed(peer, now)
        case "revoked":
            return lambda: core.revoked(peers, text, now)
        case "tick":
            return lambda: core.tick(now)
        case "counted":
            return lambda: _nothing(core.context.count(text, stimulus.count))
        case "letters":
            return lambda: _nothing(core.take_dead_letters())


def _nothing(_: object) -> list[Effect]:
    """Effects of what was asked for its mark on the core alone."""
    return []
