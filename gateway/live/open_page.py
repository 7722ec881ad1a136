"""One page that is open: it watches the fleet as a client of its own, until its browser leaves."""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import Response
from starlette.types import Receive, Scope, Send

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.gateway.exchange import EventStream
from rolloutbus.gateway.live.view import Json, LiveView
from rolloutbus.gateway.problems import openai_error
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.fleet_observer import FleetObserver

LOOK_S = 0.5
"""Between two questions to the router; heartbeats are as far apart."""
GAUGES_EVERY = 4
"""Looks between two questions to the engines."""
PACE_S = 0.1
"""Between two messages to the page."""


class OpenPages:
    """The pages that are open at one gateway."""

    def __init__(self) -> None:
        self.n = 0
        self.ending = asyncio.Event()
        """Set when the gateway ends: they are let go, for nothing else would end them."""


class OpenPage(Response):
    """Server-sent events of one page."""

    def __init__(
        self, pages: OpenPages, subscriber: Subscriber, view: LiveView, hello: Json
    ) -> None:
        """Make the response; nothing is connected before it is sent.

        Args:
            pages: it is one of these while it is open.
            subscriber: its place on the bus.
            view: what it is told.
            hello: the first event.
        """
        super().__init__()
        self._pages = pages
        self._subscriber = subscriber
        self._view = view
        self._hello = hello
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser leaves or the gateway ends.

        Raises:
            PeerLost: no router answers; nothing was sent.
        """
        self._pages.n += 1
        try:
            async with self._subscriber as subscriber, asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(self._look(subscriber.client)),
                    tasks.create_task(self._listen(subscriber)),
                    tasks.create_task(self._wait_for_end()),
                ]
                await EventStream(self._hello, self._events(), openai_error)(scope, receive, send)
                for each in working:
                    each.cancel()
        finally:
            self._pages.n -= 1

    async def _events(self) -> AsyncGenerator[Json]:
        """While one is being sent, all that is new waits in the view, which is bounded."""
        while not self._pages.ending.is_set():
            await self._news.wait()
            self._news.clear()
            for each in self._view.take():
                yield each
            if self._view.error is not None:
                raise self._view.error
            await asyncio.sleep(PACE_S)

    async def _look(self, client: RolloutClient) -> None:
        observer = FleetObserver(client, gauges_every=GAUGES_EVERY)
        while True:
            try:
                self._view.looked(await observer.look())
            except BusError as error:  # the client goes on looking for its router
                self._view.silent(str(error))
            self._news.set()
            await asyncio.sleep(LOOK_S)

    async def _listen(self, subscriber: Subscriber) -> None:
        try:
            async for event in subscriber:
                self._view.heard(event)
                self._news.set()
        except BusError as error:
            self._view.error = error
            self._news.set()

    async def _wait_for_end(self) -> None:
        await self._pages.ending.wait()
        self._news.set()
