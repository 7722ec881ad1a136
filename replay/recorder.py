"""Records a fleet: subscribes to its streams and to its router's tap, and writes a journal.

A client of the bus that asks for nothing; the bus does not notice whether it is there.
Spec: docs/journal.md.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.transport.ports import (
    SubscriptionPort,
    TopicBatchHandler,
)
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    SettingsError,
    cannot_be_pickled,
)
from rolloutbus.bus.wire.messages.membership import Welcome
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.writer import JournalWriter, now_ns
from rolloutbus.replay.listening import TapFollower, read_along, sent_away
from rolloutbus.replay.recorder_core import Build, Heard, RecorderCore
from rolloutbus.trainer_adapter.client.client import RolloutClient, settings_for
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

TICK_S = 0.25
ASK_AGAIN_S = 0.5
"""A subscription takes effect some time after it is made: what was said before is not heard."""


class Progress(NamedTuple):
    """How a recording is doing."""

    n_records: int
    durable: int
    """Records up to this number survive; -1: none yet."""
    heard: Heard
    n_dropped: int
    """Messages that had no room, because the disk is slow."""
    problem: str
    """Why nothing is recorded any more; empty while all is well."""


@strict()
class Recorder:
    """A recording under way. An async context manager.

    The end of the context closes the journal; what was heard until then is durable afterwards.
    """

    def __init__(
        self,
        client: ClientSettings,
        directory: Path,
        wanted: Filter | None = None,
        journal: JournalSettings | None = None,
        *,
        ports: Ports | None = None,
    ) -> None:
        """`client`: name and router of the client; `ports`: how to connect; None: real sockets.

        Raises:
            SettingsError: the key file cannot be used.
        """
        self._wanted = wanted or Filter()
        self._ports = ports or ports_of(dialer_of(client.security))
        self._core = RecorderCore(self._wanted)
        self._ended = asyncio.Event()
        self.journal = JournalWriter(
            directory,
            journal,
            filter_text=self._wanted.text,
            on_problem=lambda _: self._ended.set(),
        )
        link = read_along(self._ports.link, self._told)
        self.client = RolloutClient(client, Ports(link, self._subscription))
        self._tap = TapFollower(self._ports, self._on_tap)
        self._instance = ""
        self._tick: asyncio.TimerHandle | None = None
        self._n_before = 0
        self._has_begun = self._is_recording = False
        self._own_rids = f"{client.name}/"
        self._n_asking = 0
        self._dismissal = ""
        """Why the router will not have this client any more."""
        self._answered = self._echoed = ""
        """Rids of the last answers to this client, received from the router and from its tap."""
        self._news = asyncio.Event()
        self.workers_heard: set[str] = set()
        """Workers that have published anything."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the address {self.client.connection.settings.router!r} and record there"
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Begin, where an `async with` is too short; `close` ends it.

        Raises:
            PeerLost: no router answers.
            SettingsError: the directory cannot be used.
            JournalError: the journal that is there cannot be continued.
            LocalProtocolError: it has begun already.
        """
        if self._has_begun:
            raise LocalProtocolError("this recorder has begun already; make another one")
        self._has_begun = True
        await self.journal.__aenter__()
        self._n_before = self.journal.core.next_seq
        self._is_recording = True
        try:
            await self.client.open()
        except BaseException:
            await self.close()
            raise
        self._on_tick()
        return self

    async def close(self) -> None:
        """Close the journal: what was heard until now is durable then. Once is enough."""
        self.client.connection.require_home()
        if not self._is_recording:
            return
        self._is_recording = False
        if self._tick is not None:
            self._tick.cancel()
        self._ended.set()
        self._tap.close()
        await self.client.close()
        await self.journal.__aexit__(None, None, None)

    @property
    def has_tap(self) -> bool:
        """Whether the router publishes what it routes; otherwise only streams are recorded."""
        return bool(self._tap.endpoint)

    @property
    def progress(self) -> Progress:
        """As of now."""
        journal = self.journal.core
        return Progress(
            journal.next_seq - self._n_before,
            journal.durable,
            self._core.heard,
            journal.n_dropped,
            self._problem,
        )

    @property
    def _problem(self) -> str:
        return self.journal.core.problem or self._dismissal

    async def caught_up(self, deadline_s: float) -> None:
        """Wait until all that was routed before this call is in the journal, with its rows.

        Call it before what is to be recorded begins, and before the recording ends.

        Raises:
            TimeoutError: that took more than `deadline_s` seconds.
            SettingsError: the router has no tap, so it cannot be known.
            WrongEventLoop: called from another loop than that which opened it.
        """
        self.client.connection.require_home()
        if not self.has_tap:
            raise SettingsError("the router has no tap: bring the fleet up with one")
        async with asyncio.timeout(deadline_s):
            self._n_asking += 1
            try:
                while not await self._hears_an_answer():
                    pass
            finally:
                self._n_asking -= 1
            while self._core.awaits_rows:
                await self._next()

    async def stopped(self) -> str:
        """Wait until nothing can be recorded any more; returns why.

        Raises:
            WrongEventLoop: called from another loop than that which opened it.
        """
        self.client.connection.require_home()
        await self._ended.wait()
        return self._problem

    async def _hears_an_answer(self) -> bool:
        """Whether the tap, too, carries the router's answers to this client."""
        await self.client.status()
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_S):
                while self._echoed != self._answered:
                    await self._next()
                return True
        return False

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _subscription(self, _: TopicBatchHandler, __: Sequence[str]) -> SubscriptionPort:
        """What the client follows members with: its rows come to the journal instead."""
        return self._ports.subscription(self._on_stream, self._wanted.client)

    def _told(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.kind == "welcome":
                try:
                    self._welcomed(unpack_as(Welcome, entry))
                except RemoteProtocolError:
                    self._core.heard.malformed += 1
            elif entry.kind == "finished":
                self._answered = entry.rid
            elif (error := sent_away(entry)) is not None:
                self._dismissal = str(error)
                self._ended.set()
        self._write(self._core.told([entry for entry in entries if not entry.rid]))

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.instance != self._instance:
            self._instance = welcome.instance
            self._core.another_router()
        self._tap.follow(welcome.tap)

    def _on_tap(self, topic: bytes, entries: list[Entry]) -> None:
        self._write(self._core.tapped(topic, entries, now_ns()))
        if self._n_asking:
            for entry in entries:
                if entry.kind == "finished" and entry.rid.startswith(self._own_rids):
                    self._echoed = entry.rid
        self._news.set()

    def _on_stream(self, topic: bytes, entries: list[Entry]) -> None:
        self.workers_heard.update(entry.route for entry in entries)
        self._write(self._core.published(topic, entries, now_ns()))
        self._news.set()

    def _on_tick(self) -> None:
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)
        self._write(self._core.tick(now_ns()))
        self._news.set()

    def _write(self, builds: Sequence[Build]) -> None:
        for build in builds:
            self.journal.append(build)


@strict()
def record(
    address: str, directory: str | Path, *, name: str = "", key_file: str | Path = ""
) -> Recorder:
    """Create a recorder of a fleet's traffic; use it with `async with`.

    Args:
        address: of the router, as for `connect`.
        directory: for the journal; the one that is there goes on.
        name: this recorder's on the bus; a fresh one if it is left out.
        key_file: for a guarded router.

    Raises:
        SettingsError: the address is not allowed without keys, or the key file cannot be used.
    """
    own_name = name or ("" if key_file else f"recorder-{os.getpid()}")
    return Recorder(settings_for(address, own_name, key_file), Path(directory))
