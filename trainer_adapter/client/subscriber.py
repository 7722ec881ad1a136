"""Watching streams without being their client: what recorders, viewers and replay tools use."""

import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self, cast

from rolloutbus.bus.actor.home_loop import HomeLoop
from rolloutbus.bus.actor.mailbox import Mailbox
from rolloutbus.bus.security.settings import SecuritySettings
from rolloutbus.bus.security.zmq_dialer import dialer_of
from rolloutbus.bus.streams.rows import rows_of
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.transport.ports import SubscriptionPort
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import ActorStopped, RemoteProtocolError, cannot_be_pickled
from rolloutbus.bus.wire.ids import Attempt
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.bus.wire.messages.stream import Deltas
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from rolloutbus.trainer_adapter.client.core.endings import floats, ints
from rolloutbus.trainer_adapter.client.rollout import Float32s, Int32s

MAX_WAITING_ROWS = 100_000
"""Rows kept for a slow reader; older ones make room, counted in `n_dropped`."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Consecutive tokens of one attempt at one request."""

    worker: str
    rid: str
    attempt: Attempt
    seq: int
    """Index of the first token in the rollout; a jump means that rows were lost on the way."""
    tokens: Int32s
    """int32 [k]."""
    logprobs: Float32s
    """float32 [k]."""
    behaviour_logprobs: Float32s
    """float32 [k]."""
    version: int
    finish: FinishReason | None
    """Set in the last row of an attempt."""


@strict()
class StreamSubscriber:
    """An async iterator of the rows that workers publish. An async context manager.

    Nothing is repaired: what a slow or late subscriber misses shows as a jump of `seq`.
    """

    def __init__(
        self,
        endpoints: Iterable[str] = (),
        *,
        client: str = "",
        key_file: str | Path = "",
        ports: Ports | None = None,
    ) -> None:
        """Listen to these workers' stream endpoints; `client` empty means everybody's rows.

        Raises:
            SettingsError: the key file cannot be used.
        """
        self._waiting_endpoints = set(endpoints)
        self._connected: set[str] = set()
        self._clients = [client] if client else []
        security = SecuritySettings(key_file=os.fspath(key_file)) if key_file else None
        self._ports = ports or ports_of(dialer_of(security))
        self._port: SubscriptionPort | None = None
        self._home = HomeLoop("subscriber")
        self._rows = Mailbox[StreamRow](MAX_WAITING_ROWS)
        self.n_malformed = 0

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, "the workers' stream endpoints, and subscribe there")

    @property
    def n_dropped(self) -> int:
        """Rows that a reader was too slow for."""
        return self._rows.statistics().displaced

    async def __aenter__(self) -> Self:
        self._home.settle()
        self._port = self._ports.subscription(self._on_batch, self._clients)
        self.follow(self._waiting_endpoints)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._home.require()
        if self._port is not None:
            self._port.close()
            self._port = None
        self._home.leave()
        self._rows.end()

    def follow(self, endpoints: Iterable[str]) -> None:
        """Listen to exactly these endpoints from now on, e.g. those of a client's members.

        Raises:
            WrongEventLoop: called from another loop than that which opened it.
        """
        self._home.require()
        wanted = set(endpoints)
        if self._port is None:
            self._waiting_endpoints = wanted
            return
        for gone in self._connected - wanted:
            self._port.disconnect(gone)
        for new in wanted - self._connected:
            self._port.connect(new)
        self._connected = wanted

    def __aiter__(self) -> AsyncIterator[StreamRow]:
        return self

    async def __anext__(self) -> StreamRow:
        self._home.require()
        if self._port is None and not self._rows:
            raise ActorStopped("the subscriber is not open; use `async with`")
        return await self._rows.get()

    def _on_batch(self, _: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.kind != "deltas":
                continue
            try:
                self._take(entry)
            except RemoteProtocolError:
                self.n_malformed += 1

    def _take(self, entry: Entry) -> None:
        deltas = cast("Deltas", unpack(entry))
        finishes = dict(deltas.finishes)
        for index, (rid, attempt, row) in enumerate(rows_of(deltas)):
            self._rows.displace(
                StreamRow(
                    worker=entry.route,
                    rid=rid,
                    attempt=attempt,
                    seq=row.start,
                    tokens=ints(row.tokens),
                    logprobs=floats(row.logprobs),
                    behaviour_logprobs=floats(row.behaviour_logprobs or row.logprobs),
                    version=row.versions[0][0],
                    finish=finishes.get(index),
                )
            )
