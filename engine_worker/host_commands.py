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
from bus.errors import BusError, EngineFailed, RequestError
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
from bus.messages.weights import AbortUpdate, Committed, CommitUpdate, Prepared, PrepareUpdate
from bus.security.zmq_dialer import Dialer
from engine_worker.engine import Engine, MemoryTiers, PrefixCache, WeightSink
from engine_worker.engines.step_loop import EngineBusy
from engine_worker.weights.receiver import WeightReceiver
from engine_worker.weights.ways import ways_of_this_host

Result = TypeVar("Result")

MAX_AT_ONCE = 8
"""One of each kind; a `resume` must find a thread while a `pause` drains in another."""


class HostCommands:
    """One engine's control surface."""

    def __init__(self, engine: Engine, pull_timeout_s: float, dialer: Dialer | None = None) -> None:
        self._engine = engine
        self._pull_timeout_s = pull_timeout_s
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "engine-command")
        self._asleep: set[str] = set()
        self._receiver: WeightReceiver | None = None
        if isinstance(engine, WeightSink):
            self._receiver = WeightReceiver(engine.weight_specs(), ways_of_this_host(), dialer)

    @property
    def capabilities(self) -> list[str]:
        """Command kinds that the engine can do."""
        kinds = ["pause", "resume"]
        if isinstance(self._engine, WeightSink):
            kinds += ["prepare_update", "commit_update", "abort_update"]
        if isinstance(self._engine, MemoryTiers):
            kinds += ["sleep", "wake_up"]
        if isinstance(self._engine, PrefixCache):
            kinds += ["flush_cache"]
        return sorted(kinds)

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
            case PrepareUpdate():
                return await self._prepare(body)
            case CommitUpdate():
                return await self._commit(body)
            case AbortUpdate(version=version):
                assert self._receiver is not None
                self._receiver.drop(version)
                return Done()
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

    async def _prepare(self, body: PrepareUpdate) -> Prepared:
        assert self._receiver is not None
        if body.version <= self._engine.stats().version:
            return Prepared(body.version, 0, "", 0.0)
        return await self._receiver.prepare(body, timeout_s=self._pull_timeout_s)

    async def _commit(self, body: CommitUpdate) -> Committed:
        engine, receiver = self._engine, self._receiver
        assert isinstance(engine, WeightSink)
        assert receiver is not None
        if body.version <= self._engine.stats().version:
            return Committed(body.version, 0.0)
        try:
            tensors = receiver.staged(body.version)
        except KeyError as error:
            message = f"Version {body.version} is not staged here; prepare it first."
            problem = Problem(code="update_failed", message=message, outcome="not_started")
            raise EngineFailed(problem) from error
        swap = await self._off_loop(lambda: engine.install(body.version, tensors, body.in_flight))
        receiver.drop(body.version)
        return Committed(swap.version, swap.stall_ms, swap.n_retracted, swap.n_aborted)

    async def _off_loop(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
