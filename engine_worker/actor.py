"""The shell of a worker: sockets, time and the engine host's process around `WorkerCore`."""

import asyncio
import os
import random
import secrets
from collections.abc import Callable
from typing import Any

from bus.clock import BootClock
from bus.effects import Connect, Publish, Send, Stop
from bus.entry import Entry
from bus.errors import RemoteProtocolError
from bus.zmq_ports import DealerPort, PubPort
from engine_worker.core import WorkerCore
from engine_worker.effects import KillHost, StartHost, ToHost, WorkerEffect
from engine_worker.host_process import HostProcess
from engine_worker.settings import WorkerSettings

TICK_S = 0.05
FAREWELL_S = 0.05
"""libzmq cannot tell when a message has left: the goodbye gets this long."""


class WorkerActor:
    """One worker process."""

    def __init__(
        self, settings: WorkerSettings, on_joined: Callable[[str], None] | None = None
    ) -> None:
        self._settings = settings
        self._on_joined = on_joined
        """Called once, with the stream endpoint, when the router has given the first lease."""
        self._loop = asyncio.get_running_loop()
        self._clock = BootClock()
        self._publisher = PubPort(settings.stream)
        self._router: DealerPort | None = None
        self._host: HostProcess | None = None
        self._stopped: asyncio.Future[str] = self._loop.create_future()
        self._is_flush_due = False
        self._hosts: asyncio.TaskGroup | None = None
        self.core = WorkerCore(
            settings,
            secrets.token_hex(16),
            self._publisher.endpoint,
            os.getpid(),
            random.SystemRandom(),
        )

    async def run(self) -> str:
        """Work until told to stop; returns why.

        Raises:
            BaseExceptionGroup: a bug; the engine host is gone when it arrives.
        """
        self._loop.set_exception_handler(self._broken)
        async with asyncio.TaskGroup() as hosts:
            self._hosts = hosts
            self._apply(self.core.start(self._clock.now()))
            self._tick()
            try:
                return await self._stopped
            finally:
                await self._close()

    def stop(self) -> None:
        """Leave now; clients resume elsewhere what runs here."""
        self._apply(self.core.stop(self._clock.now()))

    def _apply(self, effects: list[WorkerEffect]) -> None:
        # Before anything is sent: the core's last words of this tick then go out in the same
        # frame, ahead of the port's own flush.
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._router is not None:
                        self._router.send(entry)
                case ToHost(entry):
                    if self._host is not None:
                        self._host.send(entry)
                case Publish(topic, entry):
                    self._publisher.publish(topic, entry)
                case Connect():
                    self._connect()
                case StartHost():
                    assert self._hosts is not None
                    self._hosts.create_task(self._run_host())
                case KillHost():
                    if self._host is not None:
                        self._host.kill()
                case Stop(reason):
                    self._stop(reason)

    def _flush(self) -> None:
        effects = self.core.flush(self._clock.now())
        if effects:
            self._apply(effects)
        self._is_flush_due = False

    def _tick(self) -> None:
        if not self._stopped.done():
            self._loop.call_later(TICK_S, self._tick)
            self._apply(self.core.tick(self._clock.now()))

    def _connect(self) -> None:
        if self._router is not None:
            self._router.close()
        self._router = DealerPort(self._settings.router, self._from_router, self._link_down)

    def _from_router(self, entries: list[Entry]) -> None:
        self._apply(self.core.bus(entries, self._clock.now()))
        if self._on_joined is not None and self.core.member.state == "leased":
            self._on_joined(self._publisher.endpoint)
            self._on_joined = None
        if self._on_joined is not None and self.core.member.state == "leased":
            self._on_joined(self._publisher.endpoint)
            self._on_joined = None

    def _link_down(self) -> None:
        self._apply(self.core.link_down(self._clock.now()))

    def _from_host(self, entries: list[Entry]) -> None:
        try:
            self._apply(self.core.host(entries, self._clock.now()))
        except RemoteProtocolError as error:
            self._apply([KillHost(str(error))])

    async def _run_host(self) -> None:
        self._host = host = await HostProcess.start(self._settings, self._from_host)
        try:
            reason = await host.wait()
        finally:
            self._host = None
            await host.stop()
        self._apply(self.core.host_exited(reason, self._clock.now()))

    def _stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: that is a bug, and this worker must not go on with it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, BaseException) and not self._stopped.done():
            self._stopped.set_exception(error)

    async def _close(self) -> None:
        await asyncio.sleep(FAREWELL_S)
        if self._router is not None:
            self._router.close()
        self._publisher.close()
        if self._host is not None:
            await self._host.stop()
