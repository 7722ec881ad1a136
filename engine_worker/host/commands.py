"""Control commands as the engine host carries them out: off its loop, by the engine's parts.

The actor has checked that the command fits the worker's state; here it meets the engine.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.commands import done_by
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import BusError, EngineFailed, RequestError
from rolloutbus.bus.wire.messages.control import Memory, Pause, Resume, Sleep, WakeUp
from rolloutbus.bus.wire.messages.endings import Done, Problem, bad_request
from rolloutbus.engine_worker.engine import Engine, EngineBusy
from rolloutbus.engine_worker.host.operations import (
    Operation,
    Operations,
    OperatorPaths,
    StoreAccess,
    there,
)
from rolloutbus.engine_worker.host.weight_commands import (
    WEIGHT_COMMANDS,
    WeightCommand,
    WeightCommands,
)
from rolloutbus.engine_worker.weights.relay import Relay

Result = TypeVar("Result")


class HostCommands:
    """One engine's control surface."""

    def __init__(
        self,
        engine: Engine,
        pull_timeout_s: float,
        dialer: Dialer | None = None,
        relay: Relay | None = None,
        paths: OperatorPaths | None = None,
        policy: str = "default",
    ) -> None:
        """Find out what the engine can do.

        Args:
            engine: to be commanded.
            pull_timeout_s: for the bytes of a version or an adapter to come.
            dialer: the keys to connect with, if any.
            relay: serves what is held here to other workers.
            paths: where commands may read and write; None: nowhere.
            policy: whose weights the engine has.
        """
        paths = paths or OperatorPaths()
        self._engine = engine
        # One for each kind: a `resume` must find a thread while a `pause` drains in another.
        self._threads = ThreadPoolExecutor(len(done_by("engine")), "engine-command")
        self._asleep: set[str] = set()
        self._weights: WeightCommands | None = None
        if engine.weights is not None:
            self._weights = WeightCommands(
                *(engine, engine.weights, self._threads, pull_timeout_s),
                relay=relay or Relay(),
                dialer=dialer,
                root=paths.weights_root,
            )
        store = StoreAccess(policy, dialer, pull_timeout_s)
        self._operations = Operations(engine, self._threads, paths, store)

    @property
    def capabilities(self) -> list[str]:
        """Command kinds that the engine can do."""
        kinds = ["pause", "resume", *self._operations.kinds]
        if self._weights is not None:
            kinds += WEIGHT_COMMANDS
        if self._engine.memory is not None:
            kinds += ["sleep", "wake_up"]
        return sorted(kinds)

    @property
    def adapters(self) -> dict[str, int]:
        """Those that are loaded, and their versions."""
        return self._operations.adapters

    @property
    def transports(self) -> list[str]:
        """Ways by which the engine can take weights."""
        return self._weights.transports if self._weights is not None else []

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
            return await there(self._weights).do(body)
        if isinstance(body, Operation):
            return await self._operations.do(body)
        match body:
            case Pause(mode):
                await self._off_loop(lambda: self._engine.pause(mode))
                return Done()
            case Resume():
                await self._off_loop(self._engine.resume)
                return Done()
            case Sleep() | WakeUp():
                return await self._memory(body)
            case _:
                raise ValueError(f"the engine host cannot do {type(body).__name__}")

    async def _memory(self, body: Sleep | WakeUp) -> Memory:
        memory = there(self._engine.memory)
        tags: list[str] = list(body.tags)
        change = memory.sleep if isinstance(body, Sleep) else memory.wake_up
        try:
            freed = await self._off_loop(lambda: change(tags))
        except ValueError as error:  # the engine works, but has no such tag
            raise EngineFailed(bad_request("tags", str(error))) from error
        self._asleep = (
            self._asleep | set(tags) if isinstance(body, Sleep) else self._asleep - set(tags)
        )
        return Memory(dict(freed.bytes_by_tag), sorted(self._asleep))

    async def _off_loop(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
