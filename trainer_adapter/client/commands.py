"""Commands to the router and to workers: sent over a connection, with their answers awaited."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from rolloutbus.bus.actor.ref import FLEET, ROUTER, ActorRef, worker
from rolloutbus.bus.wire.errors import BusError, DeadlineExceeded, Refused
from rolloutbus.bus.wire.messages import control
from rolloutbus.bus.wire.messages.control import FleetStatus, Pause, Resume, Status
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.client.connection import Connection
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult

ResultT = TypeVar("ResultT", bound=msgspec.Struct)

FleetRef = ActorRef[Result, Delta]
"""The address of the router, of one member or of all workers, as a client holds it."""


LEAST_S = 1.0
"""A step of several gets at least so long, however little the steps before it have left."""


ALL_TAGS: tuple[control.MemoryTag, ...] = get_args(control.MemoryTag)


class MemoryTag:
    """Names of the parts of an engine's memory, for `sleep` and `wake_up`."""

    WEIGHTS: Final = "weights"
    KV_CACHE: Final = "kv_cache"
    CUDA_GRAPH: Final = "cuda_graph"
    """Captured graphs."""
    ALL: ClassVar[list[control.MemoryTag]] = [*ALL_TAGS]
    TRAINING_DEFAULT: ClassVar[list[control.MemoryTag]] = [WEIGHTS]
    """What a trainer on the same GPU can do without while it brings new weights."""


class Commands:
    """Sends commands and awaits their answers; a deadline of 0 is the control deadline."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._n_turns = 0
        """Number of commands given to one of the ready workers; the workers take turns."""

    def ref(self, address: str = ROUTER) -> FleetRef:
        """What to `tell`, `ask` and `stream` at this address."""
        return ActorRef(address, self.connection)

    async def to_router(
        self, expected: type[ResultT], body: msgspec.Struct, deadline_s: float
    ) -> ResultT:
        """Ask the router."""
        return await self.ref().ask_for(expected, body, deadline_s=self._deadline(deadline_s))

    async def status(self, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table: workers, versions, queue."""
        return await self.to_router(FleetStatus, Status(), deadline_s)

    async def to_workers(
        self, body: msgspec.Struct, target: str, deadline_s: float, *, check: bool
    ) -> FleetResult:
        """Ask the whole fleet, or the worker of this name.

        Raises:
            FleetCommandFailed: with `check`: a worker did not do it.
            Refused: with `check`: there is no worker.
        """
        ref = self.ref(FLEET if target == FLEET else worker(target))
        result = await ref.ask_for(FleetResult, body, deadline_s=self._deadline(deadline_s))
        if check:
            _check(result, body)
        return result

    async def to_one(
        self,
        expected: type[ResultT],
        body: msgspec.Struct,
        name: str,
        policy: str,
        deadline_s: float,
    ) -> ResultT:
        """Ask the worker of this name; if empty, the ready workers of the policy take turns."""
        target = name or self._next_ready(policy)
        result = await self.to_workers(body, target, deadline_s, check=False)
        return result.only(expected)

    async def emptied(
        self,
        body: msgspec.Struct,
        target: str,
        deadline_s: float,
        *,
        mode: Literal["abort", "drain"],
        check: bool,
    ) -> FleetResult:
        """Ask workers that first stop what they run, or let it end; then have them go on.

        Workers that were paused before stay paused, whatever happens, and who joins is paused if
        they would have been. A worker's result is what
        went wrong first: it may have done it and still be paused.

        Args:
            body: what to ask of them when nothing runs there.
            target: `fleet` or the name of one worker.
            deadline_s: for stopping and `body` together, seconds from now.
            mode: `abort` stops requests, `drain` lets them end.
            check: as of `to_workers`.
        """
        patience_s = self._deadline(deadline_s)
        ends_at = time.monotonic() + patience_s
        before = await self.status(deadline_s)
        addresses = [target]
        if target == FLEET and before.paused:  # a pause of the fleet would forget these
            addresses = [each.name for each in before.workers]
        earlier: dict[str, control.Paused] = {
            each: before.paused.get(each, before.pause) for each in addresses
        }
        results: list[FleetResult] = []
        try:
            pauses = dict.fromkeys(addresses, Pause(mode))
            paused = await self._to_each(pauses, deadline_s)
            results.append(paused)
            left_s = max(LEAST_S, ends_at - time.monotonic())
            results.append(await self.to_workers(body, target, left_s, check=False))
        finally:  # also of a pause that was given up: it may have come to pass
            restored = {each: Pause(was) if was else Resume() for each, was in earlier.items()}
            results.append(await self._to_each(restored, 0.0))
        result = of_second(results)
        if mode == "drain":
            late = [
                name
                for name in paused.silent
                if name in results[1].by_worker or name in results[1].silent
            ]
            result = undrained(result, late, patience_s)
        if check:
            _check(result, body)
        return result

    async def _to_each(
        self, bodies: Mapping[str, Pause | Resume], deadline_s: float
    ) -> FleetResult:
        """Tell each address its own; of several, one that is gone does not keep it from others."""
        results = await asyncio.gather(
            *(
                self.to_workers(body, each, deadline_s, check=False)
                for each, body in bodies.items()
            ),
            return_exceptions=True,
        )
        by_worker: dict[str, msgspec.Struct | BusError] = {}
        silent: list[str] = []
        for address, result in zip(bodies, results, strict=True):
            if isinstance(result, FleetResult):
                by_worker.update(result.by_worker)
                silent.extend(result.silent)
            elif isinstance(result, BusError) and len(bodies) > 1:
                by_worker[address] = result
            else:
                raise result
        return FleetResult(by_worker, silent)

    def _deadline(self, deadline_s: float) -> float:
        return deadline_s or self.connection.settings.control_deadline_s

    def _next_ready(self, policy: str) -> str:
        there = [each for each in self.connection.members if each.policy == policy]
        # What is known of their states may be old: with none better, let one judge by itself.
        ready = [each.name for each in there if each.state == "ready"]
        ready = ready or [each.name for each in there]
        if not ready:
            message = f"no worker of policy {policy!r} is there"
            raise Refused(Problem("not_ready", message, "not_started", retry_after_ms=250))
        self._n_turns += 1
        return sorted(ready)[self._n_turns % len(ready)]


def _check(result: FleetResult, body: msgspec.Struct) -> None:
    """Raises unless every worker did it; only a pause or a resume may find no worker."""
    if not (result.by_worker or result.silent or isinstance(body, Pause | Resume)):
        message = "no worker is there, so nobody did it; `status` tells of those that are"
        raise Refused(Problem("not_ready", message, "not_started", field="target"))
    result.check()


def of_second(results: list[FleetResult]) -> FleetResult:
    """The results of the second step, or instead of them the first errors of any step.

    A worker that let one step pass in silence, and refused another one, has said why. One that was
    late with the first step, and did the second one, has done both.
    """
    by_worker = dict(results[1].by_worker)
    silent = {name: None for name in results[0].silent if name not in by_worker}
    for result in reversed(results):
        by_worker.update(result.errors)
    for result in results[1:]:
        silent.update(dict.fromkeys(result.silent))
    mute = [name for name in silent if not isinstance(by_worker.get(name), BusError)]
    return FleetResult({name: each for name, each in by_worker.items() if name not in mute}, mute)


def undrained(result: FleetResult, late: Sequence[str], patience_s: float) -> FleetResult:
    """The result of what followed a drain that some workers did not end in time.

    Args:
        result: it says that they refused, or were silent.
        late: the workers.
        patience_s: how long they had.
    """
    by_worker = dict(result.by_worker)
    why = f"what runs there had not ended after {patience_s:g} s"
    for name in late:
        error = by_worker.get(name)
        if name in result.silent:
            by_worker[name] = DeadlineExceeded(f"{why}, and it has not answered since")
        elif isinstance(error, Refused) and error.code == "busy":
            n_running = error.problem.message.partition(";")[0]
            message = f"{why}: {n_running}; give it a longer deadline_s, or use abort_first"
            by_worker[name] = Refused(replace(error.problem, message=message), rid=error.rid)
    return FleetResult(by_worker, [name for name in result.silent if name not in by_worker])
