"""Publishes the streams of a whole fleet at one address, for readers outside its network.

The shell around `bus.transport.zmq_topics`: it finds the workers through the router, as any client
does. Spec: docs/protocol.md, "Streams", 9.
"""

import asyncio
from collections.abc import Sequence
from typing import Self

import msgspec

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.principals import READS_EVERYTHING
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard, guard_of
from rolloutbus.bus.transport.endpoints import require_bindable
from rolloutbus.bus.transport.ports import (
    PortCounters,
    SubscriptionPort,
    TopicBatchHandler,
)
from rolloutbus.bus.transport.zmq_topics import ForwardPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.listening import read_along, sent_away
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings


class Forwarder:
    """A forwarder at work. An async context manager."""

    def __init__(self, client: ClientSettings, endpoint: str, allow_list: str = "") -> None:
        """Read the settings.

        Args:
            client: who it is, with which key, and where its router is.
            endpoint: where readers connect.
            allow_list: file that says who may; the workers' own, so that nobody reads here what
                they may not read there. Needed with a key.

        Raises:
            SettingsError: `endpoint` is beyond this machine without keys, or they cannot be used.
        """
        given = client.security or SecuritySettings()
        security = msgspec.structs.replace(given, allow_list=allow_list)
        self._endpoint = require_bindable(endpoint, security)
        self._security = security
        self._dialer = dialer_of(client.security)
        link = read_along(ports_of(self._dialer).link, self._heard)
        self._client = RolloutClient(client, Ports(link, self._subscription))
        self._ending: asyncio.Future[None] | None = None
        self._guard: SocketGuard | None = None
        self._port: ForwardPort | None = None

    async def __aenter__(self) -> Self:
        """Listen, and find the workers.

        Raises:
            SettingsError: the address cannot be had, or the key may not read all streams.
            PeerLost: no router answers.
            SecurityError: the lock does not work.
        """
        self._ending = asyncio.get_running_loop().create_future()
        self._guard = guard = guard_of(self._security)
        try:
            if guard is not None:
                _require_reader(guard)
            doorway = None if guard is None else Doorway(guard, "stream")
            self._port = ForwardPort(self._endpoint, doorway, dialer=self._dialer)
            if guard is not None:
                await guard.prove()
            await self._client.__aenter__()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()
        if self._port is not None:
            self._port.close()
        if self._guard is not None:
            self._guard.close()

    @property
    def endpoint(self) -> str:
        """Where readers connect, with the real port number and its key, if it has one."""
        return self._port.endpoint if self._port is not None else ""

    @property
    def counters(self) -> PortCounters:
        """What came from workers."""
        return self._port.up.counters if self._port is not None else PortCounters()

    async def stopped(self) -> None:
        """Forward until it can go no further.

        Raises:
            PeerLost: the router will not have it any more.
            SecurityError: the lock does not work any more.
        """
        assert self._ending is not None, "it must be entered first"
        if self._guard is None:
            await self._ending
        else:
            await self._guard.while_proven(self._ending)

    def _heard(self, entries: list[Entry]) -> None:
        for error in filter(None, map(sent_away, entries)):
            if self._ending is not None and not self._ending.done():
                self._ending.set_exception(error)

    def _subscription(self, _: TopicBatchHandler, __: Sequence[str]) -> SubscriptionPort:
        """What the client follows members with."""
        assert self._port is not None, "it listens before it connects"
        return self._port.up


def _require_reader(guard: SocketGuard) -> None:
    principal = guard.principal(guard.public)
    if principal is None or principal.role not in READS_EVERYTHING:
        who = "is not in the allow-list" if principal is None else f"is a {principal.role}'s"
        raise SettingsError(
            f"the forwarder's key {who}: it must be of a subscriber, who may read all streams"
        )
