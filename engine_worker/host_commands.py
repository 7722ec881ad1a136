"""Control commands as the engine host carries them out: off its loop, by capability.

The actor has checked that the command fits the worker's state; here it meets the engine.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from bus.codec import unpack
from bus.entry import Entry
from bus.errors import BusError, RequestError
from bus.messages.control import (
    FlushCache,
    Flushed,
    Memory,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from bus.messages.endings import Done, Problem
from bus.security.zmq_dialer import Dialer
from engine_worker.engine import Engine, MemoryTiers, PrefixCache
from engine_worker.engines.step_loop import EngineBusy
from engine_worker.weight_commands import WeightCommand, WeightCommands
from engine_worker.weights.relay import Relay

Result = TypeVar("Result")

MAX_AT_ONCE = 10
"""One of each kind; a `resume` must find a thread while a `pause` drains in another."""


class HostCommands:
    """One engine's control surface."""

    def __init__(
        self,
        engine: Engine,
        pull_timeout_s: float,
        dialer: Dialer | None = None,
        relay: Relay | None = None,
        weights_root: str = "",
    ) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "engine-command")
        self._asleep: set[str] = set()
        self._weights = WeightCommands(
            engine, self._threads, pull_timeout_s, relay or Relay(), dialer, weights_root
        )

    @property
    def capabilities(self) -> list[str]:
        """Command kinds that the engine can do."""
        kinds = ["pause", "resume", *self._weights.kinds]
        if isinstance(self._engine, MemoryTiers):
            kinds += ["sleep", "wake_up"]
        if isinstance(self._engine, PrefixCache):
            kinds += ["flush_cache"]
        return sorted(kinds)

    @property
    def transports(self) -> list[str]:
        """Ways by which the engine can take weights."""
        return self._weights.transports

    async def carry_out(self, entry: Entry) -> tuple[str, msgspec.Struct]:
        """Do it; returns kind and body of its ending."""
        try:
            return "finished", await self._do(unpack(entry))
        except RequestError as error:
            return "failed", error.problem
        except EngineBusy as refusal:  # nothing was changed; an engine that works goes on
            return "failed", Problem(code="busy", message=str(refusal), outcome="not_started")
        except (BusError, ValueError, OSError) as error:
            code = "update_failed" if entry.kind.endswith("_update") else "engine_failed"
            message = f"{type(error).__name__}: {error}"[:500]
            return "failed", Problem(code=code, message=message, outcome="failed")

    async def _do(self, body: msgspec.Struct) -> msgspec.Struct:
        if isinstance(body, WeightCommand):
            return await self._weights.do(body)
        match body:
            case Pause(mode):
                await self._off_loop(lambda: self._engine.pause(mode))
                return Done()
            case Resume():
                await self._off_loop(self._engine.resume)
                return Done()
            case Sleep() | WakeUp():
                return await self._memory(body)
            case FlushCache():
                assert isinstance(self._engine, PrefixCache)
                return Flushed(await self._off_loop(self._engine.flush_cache))
            case _:
                raise ValueError(f"the engine host cannot do {type(body).__name__}")

    async def _memory(self, body: Sleep | WakeUp) -> Memory:
        engine = self._engine
        assert isinstance(engine, MemoryTiers)
        tags: list[str] = list(body.tags)
        if isinstance(body, Sleep):
            freed = await self._off_loop(lambda: engine.sleep(tags))
            self._asleep |= set(tags)
        else:
            freed = await self._off_loop(lambda: engine.wake_up(tags))
            self._asleep -= set(tags)
        return Memory(dict(freed.bytes_by_tag), sorted(self._asleep))

    async def _off_loop(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
