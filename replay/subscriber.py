"""Follows the streams of a fleet: an async iterator of what its workers sample, gaps repaired.

The shell around `SubscriberCore`. It is a client that only watches; no actor waits for it.
Spec: docs/protocol.md, "Streams".
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from rolloutbus.bus.actor.loop import Actor, BootClock, one_by_one
from rolloutbus.bus.actor.ref import Command, worker
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.transport.endpoints import require_reachable
from rolloutbus.bus.transport.ports import (
    EVERYBODY,
    PortCounters,
    SubscriptionPort,
    TopicBatchHandler,
)
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import (
    BusError,
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
    SettingsError,
    cannot_be_pickled,
)
from rolloutbus.bus.wire.messages.generation import Repaired
from rolloutbus.bus.wire.messages.membership import Members, Welcome
from rolloutbus.replay.choice import Choice, Filter
from rolloutbus.replay.listening import TapFollower, read_along, sent_away
from rolloutbus.replay.stream.core import (
    Answer,
    AskRepair,
    SubscriberCore,
    SubscriberCounters,
    Unrepaired,
)
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.stream.events import StreamEvent
from rolloutbus.trainer_adapter.client.client import RolloutClient, settings_for
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

TICK_S = 0.1
REPAIR_S = 5.0
"""Deadline of one repair."""
TRY_LATER = frozenset({"busy", "not_ready"})
"""Refusals of a repair that are not the last word."""


@strict()
class Subscriber:
    """An async iterator of what is published. An async context manager; see `subscribe`.

    A reader that is slow is demoted, which it is told, and later restored; it never slows
    down others. What was missed is asked for again, and told to be lost only if it is.
    """

    def __init__(
        self,
        client: ClientSettings,
        wanted: Filter | None = None,
        *,
        rids: Iterable[str] = (),
        also: Iterable[str] = (),
        via: str = "",
        settings: SubscriberSettings | None = None,
        ports: Ports | None = None,
    ) -> None:
        """Make one; `async with` connects it.

        Args:
            client: who connects, and to which router.
            wanted: clients, sessions and policies to follow; None: all. With a key of role `client`
                or `trainer` clients must be named, its own, or nothing comes.
            rids: requests to follow; empty: all.
            also: clients that are named although all are wanted: with a key that may not watch all,
                their streams come, as far as they are its own, and no others.
            via: endpoint of a forwarder; empty: workers are listened to directly.
            settings: when it counts as slow.
            ports: how to connect; None: by real sockets.

        Raises:
            SettingsError: an address is not allowed without keys, or a key file cannot be used.
        """
        self._wanted = wanted or Filter()
        self._rids = frozenset(rids)
        self._also = list(also)
        self._via = require_reachable(via, client.security) if via else ""
        self._ports = ports or ports_of(dialer_of(client.security))
        self._core = SubscriberCore(
            settings or SubscriberSettings(), Choice(self._wanted), self._rids
        )
        link = read_along(self._ports.link, self._told)
        self.client = RolloutClient(client, Ports(link, self._subscription))
        """Its place on the bus; also for questions to the router, such as `status`."""
        self._streams: SubscriptionPort | None = None
        self._tap = TapFollower(self._ports, self._on_tap)
        self._actor: Actor[AskRepair] | None = None
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._n_broken = 0
        """Connections that broke, as far as they were told."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the address {self.client.connection.settings.router!r} and subscribe there"
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Connect, where an `async with` is too short; `close` ends it.

        Raises:
            PeerLost: no router answers.
            SettingsError: sessions or policies are asked for, and the router has no tap.
            LocalProtocolError: it was opened already.
        """
        if self._actor is not None:
            raise LocalProtocolError("this subscriber was opened already; make another one")
        self._actor = Actor(
            one_by_one(self._ask),
            clock=BootClock(),
            tick=self._tick,
            tick_s=TICK_S,
            flush=self._told_all,
            on_crash=self._fail,
        )
        try:
            await self.client.open()
            self._require_tap()
        except BaseException:
            await self.close()
            raise
        self._actor.start()
        return self

    async def close(self) -> None:
        """End the iteration and leave. Once is enough."""
        self.client.connection.require_home()
        if self._actor is not None:
            self._actor.stop("closed")
        self._tap.close()
        await self.client.close()
        self._news.set()

    @property
    def is_live(self) -> bool:
        """Whether it reports tokens as they arrive; otherwise it was demoted to results."""
        return self._core.events.is_live

    @property
    def counters(self) -> SubscriberCounters:
        """Gaps, repairs and losses so far."""
        return self._core.counters

    @property
    def heard(self) -> PortCounters:
        """What the socket for streams has carried."""
        return self._streams.counters if self._streams is not None else PortCounters()

    @property
    def n_waiting_bytes(self) -> int:
        """Bytes of tokens and logprobs that the reader could take now."""
        return self._core.events.n_waiting_bytes

    def catch_up(self) -> None:
        """Resumes tokens at once after a demotion, also those held back during it."""
        self._core.events.restore()
        self._news.set()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event; waits for one. Ends with the context.

        Raises:
            PeerLost: the router will not serve this subscriber any more.
            WrongEventLoop: called from another loop than that which opened it.
        """
        self.client.connection.require_home()
        while True:
            event = self._core.events.take(self.heard.streak_in)
            if event is not None:
                return event
            if self._error is not None:
                raise self._error
            if self._actor is None or not self._actor.is_running:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def _subscription(self, _: TopicBatchHandler, __: Sequence[str]) -> SubscriptionPort:
        """What the client follows members with: their rows come here instead."""
        of_rids = {rid.rpartition("/")[0] for rid in self._rids}
        clients = self._wanted.client or sorted(of_rids)
        if not clients and self._also:
            clients = [EVERYBODY, *self._also]
        self._streams = self._ports.subscription(self._on_stream, clients)
        if not self._via:
            return self._streams
        try:
            self._streams.connect(self._via)
        except SettingsError:
            self._streams.close()
            raise
        return _FixedPort(self._streams)

    def _told(self, entries: list[Entry]) -> None:
        """Handles the router's messages to this client."""
        for entry in entries:
            try:
                match entry.kind:
                    case "welcome":
                        welcome = unpack_as(Welcome, entry)
                        if self._needs_tap:
                            self._tap.follow(welcome.tap)
                        self._feed_members(welcome)
                    case "members":
                        self._feed_members(unpack_as(Members, entry))
                    case _:
                        error = sent_away(entry)
                        if error is not None:
                            self._fail(error)
            except RemoteProtocolError:
                self._core.counters.malformed += 1

    def _feed_members(self, told: Welcome | Members) -> None:
        if self._actor is not None:
            self._actor.feed(self._core.members, told.members)

    @property
    def _needs_tap(self) -> bool:
        return bool(self._wanted.session or self._wanted.policy)

    def _require_tap(self) -> None:
        if self._needs_tap and not self._tap.endpoint:
            raise SettingsError(
                "which requests belong to a session or policy shows in the router's tap only: "
                "start it with --tap"
            )

    def _on_tap(self, _: bytes, entries: list[Entry]) -> None:
        if self._actor is not None:
            self._actor.feed(self._core.tapped, entries)

    def _on_stream(self, topic: bytes, entries: list[Entry]) -> None:
        if self._actor is not None:
            self._actor.feed(self._core.published, topic, entries, self.heard.streak_in)

    def _tick(self, now: float) -> list[AskRepair]:
        asked: list[AskRepair] = []
        n_broken = self.heard.broken - self._n_broken
        if n_broken:
            self._n_broken += n_broken
            asked += self._core.interrupted(n_broken, now)
        return [*asked, *self._core.tick(now)]

    def _told_all(self, _: float) -> list[AskRepair]:
        """Runs at the end of a loop turn that received something."""
        self._news.set()
        return []

    def _ask(self, ask: AskRepair) -> None:
        command = Command("repair", ask.body, worker(ask.worker))
        try:
            _, future = self.client.connection.submit(command, REPAIR_S)
        except BusError as error:
            self._answered(ask, _unrepaired(error))
        else:
            future.add_done_callback(partial(self._ended, ask))

    def _ended(self, ask: AskRepair, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            self._answered(ask, _answer_of(done))

    def _answered(self, ask: AskRepair, answer: Answer) -> None:
        if self._actor is not None:
            self._actor.feed(self._core.answered, ask, answer)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._news.set()


class _FixedPort:
    """A subscription to one forwarder: where the workers are does not matter."""

    def __init__(self, port: SubscriptionPort) -> None:
        self.counters = port.counters
        self._port = port

    def connect(self, endpoint: str) -> None:
        """Does nothing: the forwarder connects to the workers."""

    def disconnect(self, endpoint: str) -> None:
        """Does nothing: the forwarder disconnects from the workers."""

    def close(self) -> None:
        self._port.close()


@strict()
def subscribe(
    address: str,
    *,
    clients: Iterable[str] = (),
    rids: Iterable[str] = (),
    sessions: Iterable[str] = (),
    key_file: str | Path = "",
    via: str = "",
) -> Subscriber:
    """Create a subscriber to a fleet's streams; use it with `async with`.

    Args:
        address: endpoint of the router's frontend; a guarded one's carries its public key.
        clients: whose streams; empty: everybody's.
        rids: which requests; empty: all.
        sessions: of these sessions only; the router needs a tap for that.
        key_file: the subscriber's own key, where the router asks for one.
        via: endpoint of a forwarder, where workers cannot be reached.

    Raises:
        SettingsError: an address is not allowed without keys, or the key file cannot be used.
    """
    wanted = Filter(client=list(clients), session=list(sessions))
    return Subscriber(settings_for(address, "", key_file), wanted, rids=rids, via=via)


def _answer_of(done: asyncio.Future[Any]) -> Answer:
    error = done.exception()
    if isinstance(error, BusError):
        return _unrepaired(error)
    result = done.result()
    assert isinstance(result, FleetResult)
    for each in result.by_worker.values():
        if isinstance(each, Repaired):
            return each
        assert isinstance(each, BusError)
        return _unrepaired(each)
    return Unrepaired("its worker did not answer", is_final=False)


def _unrepaired(error: BusError) -> Unrepaired:
    is_final = isinstance(error, Refused) and error.code not in TRY_LATER
    return Unrepaired(str(error), is_final)
