"""The shell of a client: sockets, time and futures around `ClientCore`, and no policy.

One future per request and one tick for all of them: no task or timer per request. It is the
messenger of every ref that a client gives out.
"""

import asyncio
import logging
import os
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn, Protocol
from weakref import WeakValueDictionary

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import Actor, BootClock, Clock, HomeLoop, one_by_one
from rolloutbus.bus.actor.mailbox import Mailbox
from rolloutbus.bus.actor.ref import Command
from rolloutbus.bus.actor.tracing import tracer_of
from rolloutbus.bus.security.zmq_curve import Dialer, dialer_of
from rolloutbus.bus.transport.endpoints import is_local, router_addresses, without_keys
from rolloutbus.bus.transport.ports import (
    LAST_WORDS_MS,
    BatchHandler,
    DownHandler,
    LinkFailure,
    LinkPort,
    SubscriptionPort,
    TopicBatchHandler,
    moved,
    sentence_of,
)
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_topics import SubPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    LocalProtocolError,
    MailboxFull,
    PeerLost,
    cannot_be_pickled,
)
from rolloutbus.bus.wire.limits import MAX_TOKENS_BYTES
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.effects import (
    ClientCounters,
    Complete,
    Deliver,
    Effect,
    FleetChanged,
    Outcome,
    PolicyUnserved,
    Report,
    Result,
    Stopped,
    Subscribe,
    Unsubscribe,
    Welcomed,
)
from rolloutbus.trainer_adapter.client.core.link import Upstream
from rolloutbus.trainer_adapter.client.core.requests import Ask, asked_by
from rolloutbus.trainer_adapter.client.core.results import Delta
from rolloutbus.trainer_adapter.client.core.session_book import HeldSession
from rolloutbus.trainer_adapter.client.core.settings import TICK_S, ClientSettings
from rolloutbus.trainer_adapter.client.traces import ClientTraces


class SessionHolder(Protocol):
    """A session of this client, as its connection knows it: `session.Session`."""

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        ...

    @property
    def worker(self) -> str:
        """Name of the worker that caches the session's prefix; empty: no worker."""
        ...


class Ports(NamedTuple):
    """Functions that make the links and subscriptions to routers and workers."""

    link: Callable[[str, BatchHandler, DownHandler], LinkPort]
    subscription: Callable[[TopicBatchHandler, Sequence[str]], SubscriptionPort]


ZMQ_PORTS = Ports(DealerPort, SubPort)


def ports_of(dialer: Dialer | None) -> Ports:
    """Real sockets, with keys if there are any."""
    if dialer is None:
        return ZMQ_PORTS
    return Ports(partial(DealerPort, dialer=dialer), partial(SubPort, dialer=dialer))


ProgressListener = Callable[[UpdateProgress], None]
FleetListener = Callable[[FleetChanged], None]

FORKED = (
    "the client belongs to process {pid}, of which this one is a fork: connect a client of its own "
    "here"
)
_log = logging.getLogger(__name__)
HOPELESS: frozenset[LinkFailure] = frozenset({"unknown-key", "wrong-role"})
"""Failures caused by an allow-list; the router looks at that file twice a second."""
REFUSED_S = 2.0
"""Seconds of refusal after which the client stops waiting to be admitted."""
SPARE_DELTAS = 4
"""A stream has at most one delta per token, and an empty last one."""


class Connection:
    """A named client's place on the bus, on the event loop that opened it."""

    def __init__(
        self, settings: ClientSettings, ports: Ports | None = None, clock: Clock | None = None
    ) -> None:
        """`ports`: how to connect; None: by real sockets, with the keys of the settings."""
        self.settings = settings
        self.dialer = dialer_of(settings.security)
        self._ports = ports or ports_of(self.dialer)
        self._clock = clock or BootClock()
        self._core = ClientCore(settings, secrets.token_hex(16), random.SystemRandom())
        self.sessions: Mapping[str, HeldSession] = self._core.sessions
        """The sessions that are open, by name; always up to date."""
        self.session_holders: WeakValueDictionary[str, SessionHolder] = WeakValueDictionary()
        """Session name -> who opens it, or has it open."""
        tracer = tracer_of("client", settings.name)
        self._traces = None if tracer is None else ClientTraces(tracer)
        self._home = HomeLoop("client")
        self._routers = router_addresses(settings.router)
        self._failures: dict[str, LinkFailure] = {}
        """Address -> why the last link there did not come to be, until a router says welcome."""
        self.address = self._routers[0]
        """Of the router that this client is linked to, or tries to be."""
        self._welcomed_at = ""
        """Address of the router that said welcome last; empty before the first."""
        self._link: LinkPort | None = None
        self._streams: SubscriptionPort | None = None
        self._futures: dict[str, asyncio.Future[Result]] = {}
        self._inboxes: dict[str, Mailbox[Delta]] = {}
        self._listeners: dict[str, ProgressListener] = {}
        self.fleet_listeners: list[FleetListener] = []
        """Called with each change of the fleet, on the loop of this connection."""
        self._actor: Actor[Effect] | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._refused_at: float | None = None
        """When the router first turned away the key, before it welcomed this client."""
        self._is_closed = False
        self._pid = 0
        """Id of the process that opened it; a forked child has neither the loop nor the sockets."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, f"the address {self.settings.router!r} and connect there")

    @property
    def members(self) -> tuple[Member, ...]:
        """Live workers, as the router last reported."""
        return self._core.members

    @property
    def fleet(self) -> str:
        """Identity of the fleet; empty before the router has reported it."""
        return self._core.fleet

    @property
    def other_fleet(self) -> FleetChanged | None:
        """The fleet that answers, if it is another one than the caller knows."""
        return self._core.other_fleet

    @property
    def is_shut_out(self) -> bool:
        """Whether this client was dismissed for good, because its key has lost its rights."""
        return self._core.is_shut_out

    def require_known_fleet(self) -> None:
        """Checks that version numbers belong to the fleet that the caller knows.

        Raises:
            OtherFleet: another fleet answers, and the caller has not accepted it.
        """
        self._core.require_known_fleet()

    def require_fleet(self, fleet: str) -> None:
        """Checks that the present fleet has this name, old or new; an empty name matches any.

        Raises:
            OtherFleet: another fleet answers, whether or not the caller has accepted it.
        """
        self._core.require_fleet(fleet)

    def accept_fleet(self) -> None:
        """Accepts the present fleet: version numbers belong to it from now on."""
        self._core.accept_fleet()

    @property
    def upstream(self) -> Upstream:
        """The router, and the weight store that the router reported."""
        return self._core.upstream

    @property
    def counters(self) -> ClientCounters:
        """What has been sent again, lost, repaired and so on."""
        return self._core.counters

    async def open(self) -> None:
        """Connect and wait for the router's welcome.

        Raises:
            PeerLost: no router answered in time.
            WrongEventLoop: it is open on another loop.
            LocalProtocolError: it is open, or was closed.
        """
        self.require_home()
        if self._actor is not None or self._is_closed:
            what = "was closed" if self._is_closed else "is open already"
            raise LocalProtocolError(f"the client {what}; a client opens once: connect another one")
        self._home.settle()
        self._pid = os.getpid()
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            self._streams = self._ports.subscription(self._on_stream, [self.settings.name])
            self._actor = Actor(
                one_by_one(self._apply),
                clock=self._clock,
                tick=self._core.tick,
                tick_s=TICK_S,
                on_crash=self._crashed,
            )
            self._actor.feed(self._core.start)
            self._actor.start()
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self._welcome
        except TimeoutError:
            self._shut()
            raise PeerLost(
                f"{self._why_not()}; {self.settings.connect_timeout_s:g} s have passed"
                + self._where_to_look(),
                outcome="not_started",
            ) from None
        except BaseException:
            self._shut()
            raise

    def close(self) -> None:
        """Say goodbye, which stops what is open, and end every waiting caller: ActorStopped.

        Raises:
            WrongEventLoop: it was opened on another loop, where it is still open.
        """
        if self._pid not in (0, os.getpid()):
            return  # its sockets are the parent's
        self.require_home()
        if self._actor is not None:
            self._actor.feed(self._core.close)
            self._is_closed = True
        self._shut()

    def tell(self, command: Command | Ask, deadline_s: float) -> None:
        """Sends a request; no caller waits for its ending.

        Raises:
            As `submit`.
        """
        actor = self._at_home()
        ask = asked_by(command)
        rid, effects = self._core.submit(ask, deadline_s, self._clock.now())
        if self._traces is not None:
            self._traces.began(rid, ask)
        actor.carry_out(effects)

    async def ask(self, command: Command | Ask, deadline_s: float) -> Result:
        """Open a request and wait for its result; leaving early aborts a generate."""
        rid, future = self.submit(command, deadline_s)
        try:
            return await future
        finally:
            self.forget(rid)

    async def stream(self, command: Command | Ask, deadline_s: float) -> AsyncGenerator[Delta]:
        """Open a streamed generate and read its deltas; raises any ending but `finished`.

        Leaving early aborts it. A reader that falls behind several samplings of the whole (work
        is lost, and `on_loss` is `retry`) gets MailboxFull.
        """
        ask = asked_by(command, stream=True)
        rid, future, inbox = self.submit_stream(ask, deadline_s)
        future.add_done_callback(_seen)
        try:
            async for delta in inbox:
                yield delta
                self.require_home()
            await future
        finally:
            self.forget(rid)

    def submit(
        self, ask: Command | Ask, deadline_s: float, listener: ProgressListener | None = None
    ) -> tuple[str, asyncio.Future[Result]]:
        """Open a request; the future gets its result or its error, the listener an update's steps.

        Raises:
            ActorStopped: closed.
            PeerLost: dismissed.
            MailboxFull: too many requests are open.
            OtherFleet: it names a version, and the fleet is another one than the caller knows.
            Refused: a field has a wrong type or size.
            WrongEventLoop: called from another loop than that which opened it.
        """
        actor = self._at_home()
        asked = asked_by(ask)
        rid, effects = self._core.submit(asked, deadline_s, self._clock.now())
        if self._traces is not None:
            self._traces.began(rid, asked)
        future = self._futures[rid] = asyncio.get_running_loop().create_future()
        if listener is not None:
            self._listeners[rid] = listener
        actor.carry_out(effects)
        return rid, future

    def submit_stream(
        self, ask: Ask, deadline_s: float
    ) -> tuple[str, asyncio.Future[Result], Mailbox[Delta]]:
        """The same, with the mailbox that its deltas come to, which ends with the request."""
        n_tokens = MAX_TOKENS_BYTES // 4 if ask.is_followed else 0
        if isinstance(ask.body, Generate):
            n_tokens = ask.body.sampling.max_new_tokens
        rid, future = self.submit(ask, deadline_s)
        inbox = self._inboxes[rid] = Mailbox[Delta](max(n_tokens, 0) + SPARE_DELTAS)
        if future.done():
            inbox.end()
        return rid, future, inbox

    def forget(self, rid: str) -> None:
        """The caller no longer waits: stops a generate unless it is detached."""
        away = self._home.away
        if away is not None:  # a stream that was read on its own loop, and left on another
            with suppress(RuntimeError):  # its loop is closed
                away.call_soon_threadsafe(self.forget, rid)
            return
        self._inboxes.pop(rid, None)
        self._listeners.pop(rid, None)
        if self._traces is not None:
            self._traces.left(rid)
        future = self._futures.pop(rid, None)
        if future is not None:
            future.cancel()
            effects = self._core.let_go(rid, self._clock.now())
            if self._actor is not None:
                self._actor.carry_out(effects)

    def abort(self, rids: Iterable[str] | None) -> int:
        """Stop generates (None: all) and updates; each still ends by itself. Returns how many.

        Raises:
            WrongEventLoop: called from another loop than that which opened it.
        """
        self.require_home()
        n_aborted, effects = self._core.abort(rids, self._clock.now())
        if self._actor is not None:
            self._actor.carry_out(effects)
        return n_aborted

    def unknown(self, rids: Iterable[str]) -> list[str]:
        """Which of these are no requests of this client: neither open, nor ended lately."""
        return self._core.unknown(rids)

    def require_home(self) -> None:
        """Checks that the caller is on the loop that opened the connection, unless it is closed.

        Raises:
            WrongEventLoop: this is another loop, or none.
            ActorStopped: this is another process.
        """
        if self._pid not in (0, os.getpid()):
            raise ActorStopped(FORKED.format(pid=self._pid))
        self._home.require()

    def _at_home(self) -> Actor[Effect]:
        self.require_home()
        return self._running()

    def _running(self) -> Actor[Effect]:
        if self._actor is None:
            how = "not open; use `async with`, or `open()` and `close()`"
            raise ActorStopped(f"the client is {'closed' if self._is_closed else how}")
        return self._actor

    def _on_batch(self, entries: list[Entry]) -> None:
        self._running().feed(self._core.receive, entries)
        if self._core.is_at_standby and isinstance(self._link, DealerPort):
            self._link.failure = "standby"

    def _on_stream(self, _: bytes, entries: list[Entry]) -> None:
        self._running().feed(self._core.receive_stream, entries)

    def _on_down(self) -> None:
        welcome, actor = self._welcome, self._running()
        self._failures[self.address] = self._failure()
        if welcome is not None and not welcome.done() and self._failure() in HOPELESS:
            self._refused_at = self._refused_at or self._clock.now()
            if self._clock.now() - self._refused_at >= REFUSED_S:
                welcome.set_exception(PeerLost(self._why_not(), outcome="not_started"))
        actor.feed(self._core.link_down)

    def _failure(self) -> LinkFailure:
        return self._link.failure if isinstance(self._link, DealerPort) else "no-answer"

    def _why_not(self) -> str:
        self._failures.setdefault(self.address, self._failure())
        if list(self._failures.values()) == ["standby"] and len(self._routers) == 1:
            return f"{sentence_of('standby', self.address, '')}: name that one's address as well"
        return ", and ".join(
            sentence_of(why, address, "a client") for address, why in self._failures.items()
        )

    def _where_to_look(self) -> str:
        is_silent = set(self._failures.values()) == {"no-answer"}
        if is_silent and all(is_local(without_keys(each)) for each in self._routers):
            return "; `rolloutbus ls` lists the fleets of this machine"
        return ""

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Send(_, entry):
                if self._traces is not None:
                    entry = self._traces.sent(entry, takes_traces=self._core.takes_traces)
                if self._link is not None:
                    self._link.send(entry)
            case Deliver(rid, delta):
                self._deliver(rid, delta)
            case Report(rid, progress):
                self._listeners.get(rid, _nobody)(progress)
            case Complete(rid, outcome):
                self._complete(rid, outcome)
            case Subscribe(endpoint):
                if self._streams is not None:
                    self._streams.connect(endpoint)
            case Unsubscribe(endpoint):
                if self._streams is not None:
                    self._streams.disconnect(endpoint)
            case Connect(n_lost):
                self._connect(n_lost)
            case Welcomed():
                self._note_welcome()
            case FleetChanged(former, fleet) as change:
                where = without_keys(self.address)
                _log.warning("fleet %s answers at %s; before it was %s", fleet, where, former)
                for listener in self.fleet_listeners:
                    # What it raises is its loop's to report, and ends no connection.
                    asyncio.get_running_loop().call_soon(listener, change)
            case PolicyUnserved(policy, served):
                near = nearest(policy, served)
                hint = f"; did you mean {near!r}?" if near else ""
                told = "no worker of policy %r is here, its requests wait for one until their "
                told += "deadlines; there are workers of %s%s"
                _log.warning(told, policy, ", ".join(served), hint)
            case Stopped(error):
                self._fail_all(error)

    def _connect(self, n_lost: int) -> None:
        if self._link is not None:
            self._failures[self.address] = self._failure()
            self._link.close()
        self.address = self._routers[n_lost % len(self._routers)]
        self._link = self._ports.link(self.address, self._on_batch, self._on_down)

    def _note_welcome(self) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)
        if self._welcomed_at not in ("", self.address):
            _log.warning("%s", moved(self._welcomed_at, self.address))
        self._welcomed_at = self.address
        self._failures.clear()

    def _deliver(self, rid: str, delta: Delta) -> None:
        inbox = self._inboxes.get(rid)
        if inbox is None:
            return
        try:
            inbox.put(delta)
        except MailboxFull:
            slow = "its reader is too slow: what was sampled anew has no room in its mailbox"
            self._complete(rid, MailboxFull(slow, outcome="unknown"))
            self.abort([rid])

    def _complete(self, rid: str, outcome: Outcome) -> None:
        if self._traces is not None:
            self._traces.ended(rid, outcome)
        inbox = self._inboxes.pop(rid, None)
        if inbox is not None:
            inbox.end()
        self._listeners.pop(rid, None)
        future = self._futures.pop(rid, None)
        if future is None or future.done():
            return
        if isinstance(outcome, BusError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _crashed(self, error: Exception) -> None:
        """Ends every waiting caller with an error after a bug in the client."""
        ending = error
        if not isinstance(ending, BusError):
            ending = ActorStopped(f"the client broke: {error!r}", outcome="unknown")
            ending.__cause__ = error
        self._fail_all(ending)
        self._shut()

    def _fail_all(self, error: BusError) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        for rid in list(self._futures):
            self._complete(rid, error)

    def _shut(self) -> None:
        if self._actor is not None:
            self._actor.stop("closed")
            self._actor = None
        if self._link is not None:
            self._link.close(linger_ms=LAST_WORDS_MS)
            self._link = None
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        self._home.leave()


def _nobody(_progress: UpdateProgress) -> None:
    """Ignores the progress of an update."""


def _seen(done: asyncio.Future[Result]) -> None:
    """Marks the error of an abandoned stream as read, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
