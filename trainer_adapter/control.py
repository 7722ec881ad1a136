"""Control of the fleet: one method per command, one result per worker."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from bus.clock import Clock
from bus.errors import RemoteProtocolError
from bus.messages.control import (
    CloseSession,
    FleetStatus,
    FlushCache,
    MemoryTag,
    OpenSession,
    Pause,
    PauseMode,
    Resume,
    ServerInfo,
    Shutdown,
    Sleep,
    Status,
    WakeUp,
)
from bus.messages.endings import Done
from trainer_adapter.connection import ZMQ_PORTS, Connection, Ports
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import FleetResult, Rollout
from trainer_adapter.settings import ClientSettings

ResultT = TypeVar("ResultT", FleetResult, FleetStatus, Done)

FLEET = "fleet"


class FleetClient:
    """A client that commands the router and its workers. An async context manager.

    `target` is `fleet` or the name of one worker. Deadlines are seconds from now for the whole
    command. A worker's failure does not raise: it stands in the result under the worker's name.
    """

    def __init__(
        self, settings: ClientSettings, ports: Ports = ZMQ_PORTS, clock: Clock | None = None
    ) -> None:
        self.connection = Connection(settings, ports, clock)

    async def __aenter__(self) -> Self:
        await self.connection.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    @property
    def bulk(self) -> str:
        """Endpoint where the weight store serves bytes; empty while none is connected."""
        return self.connection.bulk

    async def command(
        self, kind: str, body: msgspec.Struct, *, route: str = "", deadline_s: float = 0.0
    ) -> msgspec.Struct | FleetResult:
        """Send any command but `generate` and wait for its ending.

        Args:
            kind: its literal name.
            body: the struct of that kind.
            route: `fleet`, `store`, `worker:NAME`; empty for what the router answers itself.
            deadline_s: 0 takes the settings' control deadline.

        Returns:
            A FleetResult when it went to members, else the typed result.

        Raises:
            Refused: not started: unknown target, or a field is wrong.
            EngineFailed: the router could not do it.
            DeadlineExceeded: no ending came; it may have been done.
        """
        ask = Ask(kind, body, route=route)
        rid, future = self.connection.submit(
            ask, deadline_s or self.connection.settings.control_deadline_s
        )
        try:
            outcome = await future
        finally:
            self.connection.forget(rid)
        if isinstance(outcome, (FleetResult, msgspec.Struct)):
            return outcome
        raise RemoteProtocolError(f"{kind} ended with a {type(outcome).__name__}")

    async def pause(
        self, mode: PauseMode = "in_place", *, target: str = FLEET, deadline_s: float = 0.0
    ) -> FleetResult:
        """Stop sampling between two engine steps; requests wait until `resume`.

        `in_place` keeps the KV cache, `retract` drops and recomputes it, `drain` lets running
        requests finish first, `abort` stops them (this client's are resumed later by itself).
        """
        return await self._to_workers("pause", Pause(mode), target, deadline_s)

    async def resume(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Go on after a pause."""
        return await self._to_workers("resume", Resume(), target, deadline_s)

    async def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
    ) -> FleetResult:
        """Release engine memory; workers must be idle. Results are `Memory`, in bytes."""
        return await self._to_workers("sleep", Sleep(list(tags)), target, deadline_s)

    async def wake_up(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
    ) -> FleetResult:
        """Take released memory back. Results are `Memory`, in bytes."""
        return await self._to_workers("wake_up", WakeUp(list(tags)), target, deadline_s)

    async def flush_cache(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Forget cached prefixes that no request uses. Results are `Flushed`, in tokens."""
        return await self._to_workers("flush_cache", FlushCache(), target, deadline_s)

    async def server_info(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Facts and counters of engines. Results are `ServerFacts`."""
        return await self._to_workers("server_info", ServerInfo(), target, deadline_s)

    async def shutdown_worker(
        self, worker: str, *, drain: bool = True, deadline_s: float = 0.0
    ) -> FleetResult:
        """Make one worker leave, after finishing what it runs if `drain`."""
        return await self._to_workers("shutdown", Shutdown(drain), worker, deadline_s)

    async def status(self, *, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table: workers, versions, queue."""
        return await self._to_router("status", Status(), FleetStatus, deadline_s)

    @asynccontextmanager
    async def session(self, name: str) -> AsyncGenerator[str]:
        """Keep the requests that name this session on one worker; forget the place on leaving."""
        await self._to_router("open_session", OpenSession(name), Done, 0.0)
        try:
            yield name
        finally:
            await self._to_router("close_session", CloseSession(name), Done, 0.0)

    async def _to_workers(
        self, kind: str, body: msgspec.Struct, target: str, deadline_s: float
    ) -> FleetResult:
        route = target if target == FLEET else f"worker:{target}"
        outcome = await self.command(kind, body, route=route, deadline_s=deadline_s)
        return _expect(kind, outcome, FleetResult)

    async def _to_router(
        self, kind: str, body: msgspec.Struct, expected: type[ResultT], deadline_s: float
    ) -> ResultT:
        return _expect(kind, await self.command(kind, body, deadline_s=deadline_s), expected)


def _expect(
    kind: str, outcome: msgspec.Struct | FleetResult | Rollout, expected: type[ResultT]
) -> ResultT:
    if not isinstance(outcome, expected):
        raise RemoteProtocolError(f"{kind} ended with a {type(outcome).__name__}")
    return outcome
