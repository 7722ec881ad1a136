"""The router's shell: two ROUTER sockets around the loop of its core. No policy lives here."""

import contextlib
import random
import secrets
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.actor.loop import Actor, BootClock, Clock
from rolloutbus.bus.actor.process import ActorExit, announce_ready, complain, on_stop_signal, warn
from rolloutbus.bus.actor.resources import ResourceWatch
from rolloutbus.bus.actor.tracing import tracer_of
from rolloutbus.bus.security.key_files import RouterAddresses, write_router_addresses
from rolloutbus.bus.security.principals import Principal, Principals
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard, guard_of
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.transport.interfaces import is_own
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.transport.zmq_topics import TapPort
from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Dismissed, Hello
from rolloutbus.router.enrolment import Enrolment
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
from rolloutbus.router.health.dead_letters import DeadLetter, append_letters, check_letters
from rolloutbus.router.pair import FIRST_EPOCH, Pair, Rank
from rolloutbus.router.partner_link import PartnerLink
from rolloutbus.router.recording import TurnLog, core_of, recorded
from rolloutbus.router.settings import PairSettings, RouterSettings
from rolloutbus.router.tap import TapFeed, tapped
from rolloutbus.router.traces import RouterTraces, traced_handle


async def serve(settings: RouterSettings, log: TurnLog | None = None) -> ActorExit:
    """Route until SIGTERM or SIGINT; `log` keeps every turn of the core."""
    router = RouterActor(settings, secrets.token_hex(16), log=log)
    on_stop_signal(router.stop)
    async with router:
        frontend, backend = router.endpoints
        tap = {"tap": router.tap} if router.tap else {}
        _leave_addresses(settings, frontend, backend)
        announce_ready(frontend=frontend, backend=backend, **tap)
        await router.stopped()
    problem = router.core.context.superseded
    if problem:
        complain(problem)
        return ActorExit.REJECTED
    return ActorExit.STOPPED


def _leave_addresses(settings: RouterSettings, frontend: str, backend: str) -> None:
    """Note beside the keys where this router listens: `keys invite` puts it into tokens."""
    if settings.security is None or not settings.security.key_file:
        return
    if settings.pair is not None and not settings.pair.is_first:
        return  # a standby of the same host would hide the first router's
    pair = settings.pair
    others = ("", "") if pair is None else (pair.other, pair.other_backend)
    addresses = RouterAddresses(*map(_both, (frontend, backend), others))
    with contextlib.suppress(OSError):  # a convenience; invite takes an address as well
        write_router_addresses(Path(settings.security.key_file).parent, addresses)


def _both(own: str, other: str) -> str:
    """Addresses of this router and of the other one, if it is known, as they are told to peers."""
    return ",".join(split_key(each)[0] for each in (own, other) if each)


TICK_S = 0.05


class RouterActor:
    """A running router; an async context manager."""

    def __init__(
        self,
        settings: RouterSettings,
        instance: str,
        clock: Clock | None = None,
        log: TurnLog | None = None,
    ) -> None:
        """`log` records the core's inputs and effects, so that a run can be repeated."""
        if settings.seed is None:
            settings = msgspec.structs.replace(settings, seed=secrets.randbits(63))
        self._settings = settings
        self._clock = clock or BootClock()
        self._log = log
        self.core = core_of(settings, instance)
        self._handle: Handle = self.core.handle
        """What the core does, with its journal, its tap and its traces if there are any."""
        self._port: RouterPort | None = None
        self._tap: TapPort | None = None
        self._actor: Actor[Effect] | None = None
        self._pair: Pair | None = None
        self._partner: PartnerLink | None = None
        self._is_active = settings.pair is None
        """It holds the fleet; else it stands by and turns everybody away."""
        self._guard: SocketGuard | None = None
        self._enrolment: Enrolment | None = None
        self._watch = ResourceWatch()
        self._n_turned_away = 0
        self._has_warned = False

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            SettingsError: an address is in use or not allowed, or keys, the file for dead letters
                or traces cannot be used.
            SecurityError: the locks on the sockets do not work.
        """
        if self._settings.dead_letters:
            check_letters(Path(self._settings.dead_letters))
        endpoints = [self._settings.frontend, self._settings.backend]
        self._guard = guard = guard_of(self._settings.security, self._revoked)
        if guard is not None:
            assert self._settings.security is not None  # or there would be no guard
            path = Path(self._settings.security.allow_list)
            self._enrolment = Enrolment(path, guard.refresh, warn)
        try:
            port = RouterPort(
                endpoints,
                lambda peer, entries: self._feed(Received(peer, entries)),
                lambda peer: self._feed(Malformed(peer)),
                self._doorways(),
                on_undelivered=lambda peer, entries: self._feed(Returned(peer, entries)),
            )
            self._port = port
            self._open_tap()
            if self._settings.pair is None:
                self._listen_in()
            else:
                self._watch_other(self._settings.pair)
            self._actor = Actor(port.apply, clock=self._clock, tick=self._tick, tick_s=TICK_S)
            self._actor.start()
            if guard is not None:
                guard.on_changed = self._keys_changed
                self._keys_changed(guard.principals)
                await guard.prove()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; peers notice by silence and come back to the next router."""
        self.stop()
        if self._partner is not None:
            self._partner.close()
        if self._port is not None:
            self._port.close()
        if self._tap is not None:
            self._tap.close()
        if self._guard is not None:
            self._guard.close()

    @property
    def endpoints(self) -> list[str]:
        """[frontend, backend] with real port numbers."""
        return self._port.endpoints if self._port else []

    @property
    def tap(self) -> str:
        """Where it publishes what it routes, with the real port number; empty: nowhere."""
        return self._tap.endpoint if self._tap is not None else ""

    @property
    def counters(self) -> PortCounters:
        """What the sockets have carried and dropped."""
        return self._port.counters if self._port else PortCounters()

    def stop(self) -> None:
        """Serve no more."""
        if self._actor is not None:
            self._actor.stop("stopped")

    async def stopped(self) -> None:
        """Serve until `stop`, or until peers say that another router holds the fleet.

        Raises:
            SecurityError: the locks on the sockets do not work any more.
            Exception: a bug; the next router takes the table up from its peers.
        """
        if self._guard is not None and self._actor is not None:
            await self._guard.while_proven(self._actor.stopped())
        elif self._actor is not None:
            await self._actor.stopped()

    def _watch_other(self, settings: PairSettings) -> None:
        """Begin to watch the other router of the fleet."""
        dialer = dialer_of(self._settings.security)
        name = "router" if dialer is None else dialer.name
        if self._guard is not None:
            self._guard.admit_twin(name)
        leases, boot = self._settings.leases, self.core.context.instance
        self._pair = pair = Pair(settings, leases, boot, random.SystemRandom(), name)
        self._partner = PartnerLink(
            settings.other,
            dialer,
            lambda entries: pair.receive(entries, self._clock.now()),
            lambda: pair.link_down(self._clock.now()),
        )
        self._partner.apply(pair.start(self._clock.now()))

    def _heed(self, pair: Pair, now: float) -> None:
        """Do as the pair of routers decides: take over, or stand by."""
        assert self._partner is not None
        self._partner.apply(pair.tick(now, self._rank()))
        if pair.state == "active" and self._is_active and self.core.context.superseded:
            pair.rejected(self.core.context.superseded, self._rank())
        if pair.news:
            warn(pair.news)
            pair.news = ""
        if pair.state == "active" and not self._is_active:
            self._take_over(pair.epoch, now)
        elif pair.state != "active" and self._is_active:
            self._stand_down()

    def _rank(self) -> Rank:
        context = self.core.context
        return Rank(bool(context.members.workers()), context.router_epoch)

    def _take_over(self, epoch: int, now: float) -> None:
        """Serve, as a router that has just been started."""
        self._settings = settings_at(epoch, self._settings)
        self.core = core_of(self._settings, secrets.token_hex(16), self.tap)
        self._handle = self.core.handle
        self._listen_in()
        self._is_active = True
        if self._guard is not None:
            self._handle(KeysChanged(list(self._guard.principals.values())), now)

    def _stand_down(self) -> None:
        """Turn everybody away who was served."""
        assert self._port is not None
        self._is_active = False
        for each in [*self.core.context.members, *self.core.context.clients]:
            self._port.apply(turned_away(each.peer))

    def _turn_away(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        if self._pair is not None and entries and entries[0].kind == "hello":
            with contextlib.suppress(RemoteProtocolError):
                self._pair.turned_away(unpack_as(Hello, entries[0]), now)
        return turned_away(peer)

    def _tick(self, now: float) -> list[Effect]:
        if self._pair is not None:
            self._heed(self._pair, now)
        if not self._is_active:
            return []
        effects = self._handle(Ticked(), now)
        if self._pair is None and self.core.context.superseded and self._actor is not None:
            self._actor.stop(self.core.context.superseded)
        if alarms := self._watch.look(now):
            self._count("resource_alarms", len(alarms))
        if n_new := self.counters.turned_away - self._n_turned_away:
            self._count("turned_away", n_new)
            self._n_turned_away += n_new
        if self.core.dead_letters:
            self._keep(self.core.dead_letters)
            self._handle(LettersKept(), now)
        return effects

    def _keep(self, letters: list[DeadLetter]) -> None:
        if not self._settings.dead_letters:
            return
        try:
            n_kept = append_letters(Path(self._settings.dead_letters), letters)
        except OSError as error:
            n_kept = 0
            if not self._has_warned:
                self._has_warned = True
                warn(f"dead letters are lost: {self._settings.dead_letters}: {error.strerror}")
        self._count("dead_letters_dropped", len(letters) - n_kept)

    def _open_tap(self) -> None:
        if self._settings.tap:
            doorway = None if self._guard is None else Doorway(self._guard, "tap")
            self._tap = TapPort(self._settings.tap, doorway)
            self.core.context.tap = self._tap.endpoint

    def _listen_in(self) -> None:
        """Wrap the core, if settings or environment say so: events and effects are heard."""
        if self._log is not None:
            self._log.began(self._settings, self.core.context.instance, self.tap)
            self._handle = recorded(self._handle, self._log)
        if self._tap is not None:
            self._handle = tapped(
                self._handle, TapFeed(self.core.context, self._tap.offer, self._count)
            )
        tracer = tracer_of("router", "router")
        if tracer is not None:  # around the others, whose records are the same without it
            self.core.context.is_traced = True
            self._handle = traced_handle(self._handle, RouterTraces(tracer, self.core))

    def _count(self, counter: str, n: int) -> None:
        self._handle(Counted(counter, n), self._clock.now())

    def _doorways(self) -> list[Doorway]:
        if self._guard is None:
            return []
        sides = ("frontend", "backend")
        return [Doorway(self._guard, side, self._receive_signed) for side in sides]

    def _revoked(self, keys: frozenset[str]) -> None:
        if self._guard is None or self._port is None:
            return
        gone = frozenset(key for key in keys if self._guard.principal(key) is None)
        for code, some in (("forbidden", gone), ("unknown-peer", keys - gone)):
            for peer in self._port.peers_of(some):
                self._feed(Revoked([peer], code))

    def _keys_changed(self, principals: Principals) -> None:
        self._feed(KeysChanged(list(principals.values())))

    def _receive_signed(self, peer: Peer, principal: Principal, entries: list[Entry]) -> None:
        if self._is_active and principal.role == "newcomer":
            self._answer_newcomer(peer, principal, entries)
            return
        is_hello = bool(entries) and entries[0].kind == "hello"
        self._feed(Received(peer, entries, principal, self._host_of(peer) if is_hello else ""))

    def _answer_newcomer(self, peer: Peer, principal: Principal, entries: list[Entry]) -> None:
        """No entry of theirs reaches the core."""
        if self._port is None or self._enrolment is None:
            return
        for answer in self._enrolment.answer(principal, entries, self._host_of(peer)):
            self._port.send(peer, answer)
        self._port.forget(peer)

    def _host_of(self, peer: Peer) -> str:
        """IP address of the host that a connection comes from; empty if that is this one."""
        address = self._port.address_of(peer) if self._port is not None else ""
        return "" if not address or is_own(address) else address

    def _feed(self, event: Event) -> None:
        if self._actor is None:
            return
        if self._is_active:
            self._actor.feed(self._handle, event)
        elif isinstance(event, Received):
            self._actor.feed(self._turn_away, event.peer, event.entries)


def settings_at(epoch: int, settings: RouterSettings) -> RouterSettings:
    """Returns the settings of a router that becomes active at this epoch.

    After another router it finds out which workers there are: some were added or removed since
    its own start.
    """
    expected = settings.expected_workers if epoch == FIRST_EPOCH else {}
    return msgspec.structs.replace(settings, epoch=epoch, expected_workers=expected)


STANDS_BY = "this router stands by for another one: connect to that one"


def turned_away(peer: Peer) -> list[Effect]:
    """The answer of a standby router to anything that comes over a connection."""
    dismissed = Entry("dismissed", body=pack(Dismissed("standby", STANDS_BY)))
    return [SendAll(peer, [dismissed]), ForgetPeer(peer)]
