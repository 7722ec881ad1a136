"""The shell of a worker: sockets, time and the engine host's process around `WorkerCore`."""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rolloutbus.bus.actor.effects import Connect, Publish, Send, Stop
from rolloutbus.bus.actor.loop import Actor, BootClock, one_by_one
from rolloutbus.bus.actor.process import tell_progress, warn
from rolloutbus.bus.actor.tracing import tracer_of
from rolloutbus.bus.membership.deliveries import Heed, LetIn
from rolloutbus.bus.security.principals import Principals
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, guard_of
from rolloutbus.bus.transport.endpoints import advertised, router_addresses, without_keys
from rolloutbus.bus.transport.interfaces import facing
from rolloutbus.bus.transport.ports import LAST_WORDS_MS, Patience
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.core import WorkerCore
from rolloutbus.engine_worker.worker.effects import (
    KillHost,
    StartHost,
    TellProgress,
    ToHost,
    WorkerEffect,
)
from rolloutbus.engine_worker.worker.host_process import HostExit, HostProcess
from rolloutbus.engine_worker.worker.traces import WorkerTraces

TICK_S = 0.05


class WorkerActor:
    """One worker process."""

    def __init__(
        self, settings: WorkerSettings, on_joined: Callable[[str], None] | None = None
    ) -> None:
        if not settings.stream:
            settings = msgspec.structs.replace(settings, stream=facing(settings.router))
        self._settings = settings
        self._on_joined = on_joined
        """Called once, with the stream endpoint, when the router has given the first lease."""
        self._clock = BootClock()
        self._dialer = dialer_of(settings.security)
        self._guard = guard_of(settings.security, is_member=True)
        doorway = None if self._guard is None else Doorway(self._guard, "stream")
        is_unsafe = settings.security is not None and settings.security.unsafe_no_auth
        self._publisher = PubPort(settings.stream, doorway, is_unsafe=is_unsafe)
        self._stream = advertised(self._publisher.endpoint, settings.advertise)
        self._router: DealerPort | None = None
        self._routers = router_addresses(settings.router)
        self._router_at = self._routers[0]
        """Where `_router` leads."""
        self._patience = Patience(self._routers, "a worker", settings.key_patience_s)
        self._host: HostProcess | None = None
        self._hosts: asyncio.TaskGroup | None = None
        self._is_draining = False
        self._is_closing = False
        self._allow_list: Entry | None = None
        """What the router has handed over, for each engine host."""
        self.core = WorkerCore(
            settings,
            secrets.token_hex(16),
            self._stream,
            os.getpid(),
            random.SystemRandom(),
            clock_ms=lambda: time.time_ns() // 1_000_000,
        )
        tracer = tracer_of("worker", settings.name)
        self._traces = (
            WorkerTraces(tracer, self.core.member.deliveries, lambda: self.core.version)
            if tracer is not None
            else None
        )
        self._actor = Actor(
            one_by_one(self._apply),
            clock=self._clock,
            tick=self._tick,
            tick_s=TICK_S,
            flush=self.core.flush,
        )

    async def run(self) -> str:
        """Work until it is stopped; returns why.

        Raises:
            SecurityError: the lock on its socket does not work (any more).
            BaseExceptionGroup: a bug; the engine host is gone when it arrives.
        """
        if self._guard is None:
            return await self._run()
        try:
            await self._guard.prove()
            return await self._guard.while_proven(self._run())
        finally:
            self._guard.close()

    async def _run(self) -> str:
        asyncio.get_running_loop().set_exception_handler(self._broken)
        async with asyncio.TaskGroup() as hosts:
            self._hosts = hosts
            self._actor.feed(self.core.start)
            self._actor.start()
            try:
                return await self._actor.stopped()
            finally:
                await self._close()

    def stop(self) -> None:
        """Leave now; clients resume elsewhere what runs here."""
        self._actor.feed(self.core.stop)

    def drain(self) -> None:
        """Leave when what runs has ended, or `drain_s` is over; called again, leave now."""
        if self._settings.drain_s and self.core.n_running and not self._is_draining:
            warn(
                f"told to leave: {self.core.n_running} requests run and get "
                f"{self._settings.drain_s:g} s to end; another SIGTERM ends this at once"
            )
        self._is_draining = True
        self._actor.feed(self.core.drain)

    def _apply(self, effect: WorkerEffect) -> None:
        match effect:
            case Send(_, entry):
                if self._traces is not None:
                    self._traces.sent(entry)
                if self._router is not None:
                    self._router.send(entry)
            case ToHost(entry):
                if self._host is not None:
                    self._host.send(entry)
            case Publish(topic, entry):
                self._publisher.publish(topic, entry)
            case Connect(n_lost):
                self._connect(n_lost)
            case StartHost():
                assert self._hosts is not None
                self._hosts.create_task(self._run_host())
            case KillHost():
                if self._host is not None:
                    self._host.kill()
            case TellProgress(doing):
                tell_progress(doing)
            case Stop(reason):
                self._actor.stop(reason)
            case LetIn(principals, body):
                self._let_in(principals, Entry("allow_list", body=body))
            case Heed(intent, former_fleet):
                if former_fleet:
                    warn(f"this is fleet {intent.fleet}; before it was fleet {former_fleet}")

    def _let_in(self, principals: Principals, entry: Entry) -> None:
        self._allow_list = entry
        if self._guard is not None:
            self._guard.hand_over(principals)
        if self._host is not None:
            self._host.send(entry)

    def _connect(self, n_lost: int) -> None:
        if self._router is not None:
            if self.core.member.state != "leased":
                self._warn_of_waiting()
            self._router.close()
        self._router_at = self._routers[n_lost % len(self._routers)]
        if self._on_joined is not None:
            tell_progress(f"joining the router at {without_keys(self._router_at)}")
        self._router = DealerPort(
            self._router_at, self._from_router, self._link_down, dialer=self._dialer
        )

    def _tick(self, now: float) -> Sequence[WorkerEffect]:
        if self._traces is not None:
            self._traces.tick(now)
        effects = self.core.tick(now)
        if self._host is not None and self.core.needs_host(now) and self._host.is_stopped:
            effects += self.core.host_stopped(now)
        return effects

    def _from_router(self, entries: list[Entry]) -> None:
        if self._traces is not None:
            self._traces.heard(entries)
        self._actor.feed(self.core.bus, entries)
        if self.core.member.is_at_standby and self._router is not None:
            self._router.failure = "standby"
        if self.core.member.state == "leased" and (news := self._patience.joined(self._router_at)):
            warn(news)
        if self._on_joined is not None and self.core.member.state == "leased":
            self._on_joined(self._stream)
            self._on_joined = None

    def _link_down(self) -> None:
        self._warn_of_waiting()
        self._actor.feed(self.core.link_down)

    def _warn_of_waiting(self) -> None:
        if self._router is not None:
            now = self._clock.now()
            sentence = self._patience.failed(self._router.failure, self._router_at, now)
            if self._patience.given_up:
                self._actor.feed(self.core.give_up, f"forbidden: {self._patience.given_up}")
            elif sentence:
                warn(sentence)

    def _from_host(self, entries: list[Entry]) -> None:
        self._actor.feed(self._hear_host, entries)

    def _hear_host(self, entries: list[Entry], now: float) -> list[WorkerEffect]:
        try:
            return self.core.host(entries, now)
        except RemoteProtocolError as error:
            return [KillHost(str(error))]

    async def _run_host(self) -> None:
        self._host = host = await HostProcess.start(self._settings, self._from_host)
        if self._allow_list is not None:
            host.send(self._allow_list)
        try:
            if self._is_closing:  # `_close` came too early to stop it
                return
            end = await host.wait()
        finally:
            self._host = None
            await host.stop()
        self._actor.feed(self._host_exited, end)

    def _host_exited(self, end: HostExit, now: float) -> list[WorkerEffect]:
        return self.core.host_exited(end.reason, now, was_killed=end.was_killed)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: that is a bug, and this worker must not go on with it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, Exception):
            self._actor.crash(error)

    async def _close(self) -> None:
        self._is_closing = True
        if self._router is not None:
            self._router.close(linger_ms=LAST_WORDS_MS)
        self._publisher.close()
        if self._host is not None:
            await self._host.stop()
