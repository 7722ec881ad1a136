"""Plays a journal: real publishers for the recorded streams, and a stand-in for their router.

Any subscriber finds it as it finds a fleet. Spec: docs/journal.md, "Playing".
"""

import asyncio
import math
import secrets
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from rolloutbus.bus.actor.loop import Actor, BootClock
from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.transport.zmq_topics import PatientPubPort
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.player_core import (
    THE_TAP,
    JournalSurvey,
    Message,
    PlayerCore,
    PlayStep,
    Programme,
)
from rolloutbus.replay.stand_in import Effect

TICK_S = 1.0
RETRY_S = 0.001
"""Until a publisher is asked again whether its subscribers have room."""
SOONER_S = 0.001
"""A message may be published so much too early: waiting for less costs more than it is worth."""
AT_A_STRETCH = 16
"""Messages published before others on the event loop get a turn."""
READ_AT_A_STRETCH = 1_000
LINGER_MS = 10_000
"""Milliseconds that subscribers have at the end to take the last messages."""
QUIET_S = 2.0
"""Silence after the last message and repair; a reading subscriber asks for a gap at once."""
LOOK_S = 0.02


class PlayerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to play."""

    bind: str = "tcp://127.0.0.1:0"
    """Where clients find it: `tcp://` on a loopback address, or `ipc://`; streams are beside it."""
    speed: float = 1.0
    """2.0 is twice as fast as it was; infinite: as fast as the slowest subscriber reads."""
    rids: AbstractSet[str] = frozenset()
    """Rows of other requests are left out; empty: of none."""
    linger_s: float = 10.0
    """After the last message repairs are answered, while subscribers are there and ask, but at
    most so long; 0: not at all, and a gap of the last messages is lost."""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise SettingsError(f"speed must be above 0, not {self.speed:g}")
        if not self.linger_s >= 0:
            raise SettingsError(f"linger_s must be at least 0, not {self.linger_s:g}")
        if self.bind.partition("://")[0] not in ("tcp", "ipc"):
            raise SettingsError(f"{self.bind}: only ipc://PATH and tcp://HOST:PORT may be used")


class Playback(NamedTuple):
    """How far a replay has come."""

    n_played: int
    """Messages of streams and of the tap."""
    n_messages: int
    """In all."""
    position_s: float
    """In the recording."""
    length_s: float
    n_subscriptions: int
    """At the publisher that has the fewest."""
    n_clients: int
    n_repairs: int
    """Asked for by subscribers."""
    held_up_s: float
    """Spent waiting for slow subscribers."""
    is_held_up: bool


class Player:
    """A journal that can be listened to. An async context manager."""

    def __init__(self, journal: Journal, settings: PlayerSettings | None = None) -> None:
        """`journal` reports its own damage while it is read."""
        self._journal = journal
        self._settings = settings or PlayerSettings()
        self._clock = BootClock()
        self._survey = JournalSurvey()
        self._publishers: dict[str, PatientPubPort] = {}
        self._port: RouterPort | None = None
        self._core: PlayerCore | None = None
        self._actor: Actor[Effect] | None = None
        self._steps: Iterator[PlayStep] = iter(())
        """What is left after `_next`."""
        self._next: PlayStep | None = None
        """Taken, and not yet played as a whole."""
        self._subscribed = asyncio.Event()
        self._has_played_all = False
        self._n_played = 0
        self._position_s = 0.0
        self._held_up_s = 0.0
        self._is_held_up = False

    async def __aenter__(self) -> Self:
        """Read the journal through, and listen.

        Raises:
            JournalDamaged: something is missing in it, and it was not told to skip.
            JournalError: a later format.
            SettingsError: it has no streams, or an address is in use or not allowed.
        """
        for n, record in enumerate(self._journal):
            self._survey.add(record)
            if n % READ_AT_A_STRETCH == 0:
                await asyncio.sleep(0)  # so that it can be interrupted
        if not self._survey.workers:
            raise SettingsError(f"{self._journal.directory} holds no streams to play")
        try:
            self._listen()
        except BaseException:
            self._close(linger_ms=0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._has_played_all:
                await self._linger()
        finally:
            self._close(linger_ms=LINGER_MS if kind is None else 0)

    @property
    def address(self) -> str:
        """Where clients connect, as to a router."""
        return self._port.endpoints[0] if self._port is not None else ""

    @property
    def workers(self) -> list[str]:
        """Names of the workers with recorded streams."""
        return list(self._survey.workers)

    @property
    def playback(self) -> Playback:
        """As of now."""
        has_tap = THE_TAP in self._publishers
        router = self._core.router if self._core is not None else None
        return Playback(
            n_played=self._n_played,
            n_messages=self._survey.n_messages + (self._survey.n_tapped if has_tap else 0),
            position_s=self._position_s,
            length_s=self._survey.length_s,
            n_subscriptions=self._n_subscriptions,
            n_clients=router.n_clients if router is not None else 0,
            n_repairs=router.n_repairs if router is not None else 0,
            held_up_s=self._held_up_s,
            is_held_up=self._is_held_up,
        )

    async def subscribed(self, n_subscriptions: int, *, n_of_tap: int = 0) -> None:
        """Wait until each worker's publisher has so many: one per topic of a subscriber.

        Recorders listen to the tap as well: `n_of_tap` of them, if the recording has one.
        """
        tap = self._publishers.get(THE_TAP)
        while self._n_subscriptions < n_subscriptions or (tap and tap.n_subscriptions < n_of_tap):
            self._subscribed.clear()
            await self._subscribed.wait()

    async def play(self, until_s: float = math.inf) -> None:
        """Publish what is left, in its order; returns when the last message was taken.

        `until_s`: seconds of the recording; what comes later is left for the next call, and so is
        all that was not published when this one is cancelled.

        Raises:
            JournalDamaged: as on entering.
        """
        began_at = self._clock.now() - self._position_s / self._settings.speed
        n_since = 0
        while step := self._next or next(self._steps, None):
            self._next = step
            if step.at_s > until_s:
                return
            wait_s = began_at + step.at_s / self._settings.speed - self._clock.now()
            if wait_s > SOONER_S:
                await asyncio.sleep(wait_s)
                n_since = 0
            self._position_s = step.at_s
            self._apply(step.effects)
            self._next = step._replace(effects=[])
            n_since += 1
            if n_since >= AT_A_STRETCH:
                n_since = 0
                await asyncio.sleep(0)
            if step.message is not None:
                await self._hand_over(step.message)
            self._next = None
        self._position_s = self._survey.length_s
        self._has_played_all = True

    async def _linger(self) -> None:
        """Answer repairs until all subscribers have left, or have had the time to ask."""
        assert self._core is not None
        router, ended_at = self._core.router, self._clock.now()
        while router.n_clients and any(each.n_subscriptions for each in self._publishers.values()):
            now = self._clock.now()
            is_quiet = now - max(ended_at, router.repair_at) >= QUIET_S
            if is_quiet or now - ended_at >= self._settings.linger_s:
                return
            await asyncio.sleep(LOOK_S)

    def _listen(self) -> None:
        settings = self._settings
        self._port = RouterPort([settings.bind], self._receive)
        members = [
            msgspec.structs.replace(member, stream=self._publisher(name))
            for name, member in self._survey.workers.items()
        ]
        # Numbers of the tap would have holes if only some of what was routed were told.
        tap = self._publisher(THE_TAP) if self._survey.n_tapped and not settings.rids else ""
        programme = Programme(members, tap, settings.rids)
        self._core = PlayerCore(programme, secrets.token_hex(16))
        self._steps = map(self._core.step, self._journal)
        tick = self._core.router.tick
        self._actor = Actor(self._port.apply, clock=self._clock, tick=tick, tick_s=TICK_S)
        self._actor.start()

    def _publisher(self, name: str) -> str:
        endpoint = _beside(self._settings.bind, len(self._publishers))
        port = self._publishers[name] = PatientPubPort(endpoint, self._subscribed.set)
        return port.endpoint

    @property
    def _n_subscriptions(self) -> int:
        streams = [port for name, port in self._publishers.items() if name != THE_TAP]
        return min((port.n_subscriptions for port in streams), default=0)

    async def _hand_over(self, message: Message) -> None:
        assert self._core is not None
        publisher, began_at = self._publishers[message.publisher], self._clock.now()
        while not publisher.offer(message.topic, message.entries):
            self._is_held_up = True
            await asyncio.sleep(RETRY_S)  # a publisher does not tell when there is room again
        if self._is_held_up:
            self._is_held_up = False
            self._held_up_s += self._clock.now() - began_at
        self._core.published(message)
        self._n_played += 1

    def _apply(self, effects: Sequence[Effect]) -> None:
        if effects and self._actor is not None:
            self._actor.carry_out(effects)

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        if self._actor is not None and self._core is not None:
            self._actor.feed(self._core.router.receive, peer, entries)

    def _close(self, *, linger_ms: int) -> None:
        if self._actor is not None:
            self._actor.stop("closed")
        for publisher in self._publishers.values():
            publisher.close(linger_ms=linger_ms)
        self._publishers.clear()
        if self._port is not None:
            self._port.close()
            self._port = None


def _beside(bind: str, number: int) -> str:
    """A publisher's endpoint, for a player that clients find at `bind`."""
    if bind.startswith("ipc://"):
        return f"{bind}.{number}"
    return f"{bind.rpartition(':')[0]}:0"
