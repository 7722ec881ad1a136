"""The shell of a client: sockets, time and futures around `ClientCore`, and no policy.

One future per request and one tick for all of them: no task or timer per request.
"""

import asyncio
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bus.clock import BootClock, Clock
from bus.codec import topic_of
from bus.effects import Connect, Send
from bus.entry import Entry
from bus.errors import ActorStopped, BusError, PeerLost
from bus.messages.membership import Member
from bus.ports import (
    BatchHandler,
    DownHandler,
    LinkPort,
    SubscriptionPort,
    TopicBatchHandler,
)
from bus.zmq_ports import DealerPort, SubPort
from trainer_adapter.client_core import ClientCore
from trainer_adapter.counters import ClientCounters
from trainer_adapter.effects import (
    Complete,
    Deliver,
    Effect,
    Outcome,
    Stopped,
    Subscribe,
    Unsubscribe,
    Welcomed,
)
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import Delta
from trainer_adapter.settings import TICK_S, ClientSettings

GOODBYE_LINGER_MS = 1000
"""At most this long the last messages may take to leave, in the background."""


class Ports(NamedTuple):
    """How to reach routers and workers."""

    link: Callable[[str, BatchHandler, DownHandler], LinkPort]
    subscription: Callable[[TopicBatchHandler, Sequence[bytes]], SubscriptionPort]


ZMQ_PORTS = Ports(DealerPort, SubPort)

Inbox = asyncio.Queue[Delta | None]
"""The deltas of one stream, at most one per token asked for; None after the last."""


class Connection:
    """A named client's place on the bus, on the event loop that opened it."""

    def __init__(
        self, settings: ClientSettings, ports: Ports = ZMQ_PORTS, clock: Clock | None = None
    ) -> None:
        self.settings = settings
        self._ports = ports
        self._clock = clock or BootClock()
        self._core = ClientCore(settings, secrets.token_hex(16), random.SystemRandom())
        self._link: LinkPort | None = None
        self._streams: SubscriptionPort | None = None
        self._futures: dict[str, asyncio.Future[Outcome]] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._welcome: asyncio.Future[None] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """Live workers, as the router last told."""
        return self._core.members

    @property
    def bulk(self) -> str:
        """Where the weight store serves bytes; empty while none is here."""
        return self._core.bulk

    @property
    def counters(self) -> ClientCounters:
        """What has been sent again, lost, repaired and so on."""
        return self._core.counters

    async def open(self) -> None:
        """Connect and wait for the router's welcome.

        Raises:
            PeerLost: no router answered in time.
        """
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        try:
            self._streams = self._ports.subscription(
                self._on_stream, [topic_of(self.settings.name)]
            )
            self._apply(self._core.start(self._clock.now()))
            self._ticker = loop.call_later(TICK_S, self._tick)
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self._welcome
        except TimeoutError:
            self._shut()
            raise PeerLost(
                f"no router answered at {self.settings.router} within "
                f"{self.settings.connect_timeout_s:g} s",
                outcome="not_started",
            ) from None
        except BaseException:
            self._shut()
            raise

    def close(self) -> None:
        """Say goodbye, which stops what is open, and end every waiting caller: ActorStopped."""
        self._apply(self._core.close(self._clock.now()))
        self._shut()

    def submit(self, ask: Ask, deadline_s: float) -> tuple[str, asyncio.Future[Outcome]]:
        """Open a request; the future gets its result or its error.

        Raises:
            ActorStopped: closed or dismissed.
            MailboxFull: too many requests are open.
        """
        if self._ticker is None:
            raise ActorStopped("the client is not open; use `async with`")
        rid, effects = self._core.submit(ask, deadline_s, self._clock.now())
        future = self._futures[rid] = asyncio.get_running_loop().create_future()
        self._apply(effects)
        return rid, future

    def submit_stream(
        self, ask: Ask, deadline_s: float
    ) -> tuple[str, asyncio.Future[Outcome], Inbox]:
        """The same, with the inbox that its deltas come to."""
        rid, future = self.submit(ask, deadline_s)
        inbox = self._inboxes[rid] = Inbox()
        return rid, future, inbox

    def forget(self, rid: str) -> None:
        """Nobody waits for this request any more: stop it if it still runs."""
        self._inboxes.pop(rid, None)
        future = self._futures.pop(rid, None)
        if future is not None:
            future.cancel()
            self.abort([rid])

    def abort(self, rids: Iterable[str] | None) -> int:
        """Stop generates (None: all); each still ends by itself. Returns how many."""
        n_aborted, effects = self._core.abort(rids, self._clock.now())
        self._apply(effects)
        return n_aborted

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._feed(lambda: self._core.tick(self._clock.now()))

    def _on_batch(self, entries: list[Entry]) -> None:
        self._feed(lambda: self._core.receive(entries, self._clock.now()))

    def _on_stream(self, _: bytes, entries: list[Entry]) -> None:
        self._feed(lambda: self._core.receive_stream(entries, self._clock.now()))

    def _on_down(self) -> None:
        self._feed(lambda: self._core.link_down(self._clock.now()))

    def _feed(self, event: Callable[[], list[Effect]]) -> None:
        try:
            self._apply(event())
        except BusError as error:  # our own bug: whoever waits must hear of it
            self._fail_all(error)
            self._shut()
            raise

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._link is not None:
                        self._link.send(entry)
                case Deliver(rid, delta):
                    if inbox := self._inboxes.get(rid):
                        inbox.put_nowait(delta)
                case Complete(rid, outcome):
                    self._complete(rid, outcome)
                case Subscribe(endpoint):
                    if self._streams is not None:
                        self._streams.connect(endpoint)
                case Unsubscribe(endpoint):
                    if self._streams is not None:
                        self._streams.disconnect(endpoint)
                case Connect():
                    self._connect()
                case Welcomed():
                    if self._welcome is not None and not self._welcome.done():
                        self._welcome.set_result(None)
                case Stopped(error):
                    self._fail_all(error)

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._ports.link(self.settings.router, self._on_batch, self._on_down)

    def _complete(self, rid: str, outcome: Outcome) -> None:
        inbox = self._inboxes.pop(rid, None)
        if inbox is not None:
            inbox.put_nowait(None)
        future = self._futures.pop(rid, None)
        if future is None or future.done():
            return
        if isinstance(outcome, BusError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail_all(self, error: BusError) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        for rid in list(self._futures):
            self._complete(rid, error)

    def _shut(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._link is not None:
            self._link.close(linger_ms=GOODBYE_LINGER_MS)
            self._link = None
        if self._streams is not None:
            self._streams.close()
            self._streams = None
