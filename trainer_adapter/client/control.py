"""Control of the fleet: one method per command, one result per worker."""

from collections.abc import Sequence
from typing import NoReturn, Self, TypeVar

import msgspec

from rolloutbus.bus.actor.loop import Clock
from rolloutbus.bus.actor.ref import FLEET, ROUTER, ActorRef, worker
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import Refused, cannot_be_pickled
from rolloutbus.bus.wire.messages.control import (
    DEVICE,
    CacheTier,
    FleetStatus,
    FlushCache,
    MemoryTag,
    Pause,
    PauseMode,
    Resume,
    ServerInfo,
    Shutdown,
    Sleep,
    Status,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.client.connection import Connection, FleetListener, Ports
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged, Result
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

ResultT = TypeVar("ResultT", bound=msgspec.Struct)

FleetRef = ActorRef[Result, Delta]
"""The address of the router, of one member or of all workers, as a client holds it."""


@strict()
class FleetClient:
    """A client that commands the router and its workers. An async context manager.

    `target` is `fleet` or the name of one worker. Deadlines are seconds from now for the whole
    command; 0 takes the settings' control deadline. A command that some target did not do raises
    FleetCommandFailed, which says who and why, and one that reached no worker at all Refused, code
    `not_ready`; with `check=False` it returns: errors then stand in the result under the workers'
    names. `pause` and `resume` are kept for workers that join later. A launched or lately lost
    worker that is away while the fleet gets another command that changes workers (`sleep`,
    `flush_cache`) stands in `silent`.
    """

    def __init__(
        self, settings: ClientSettings, ports: Ports | None = None, clock: Clock | None = None
    ) -> None:
        self.connection = Connection(settings, ports, clock)

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the address {self.connection.settings.router!r} and connect there"
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Connect, for whom an `async with` is too short; `close` ends it.

        Raises:
            PeerLost: no router answered in time.
            LocalProtocolError: it is open, or was closed: a client opens once.
        """
        await self.connection.open()
        return self

    async def close(self) -> None:
        """Leave: what is open is stopped, and its callers get ActorStopped. Once is enough."""
        self.connection.close()

    @property
    def fleet(self) -> str:
        """Identity of the fleet, e.g. for `connect(fleet=…)`; empty before the router told it."""
        return self.connection.fleet

    @property
    def other_fleet(self) -> FleetChanged | None:
        """(former, fleet) while a fleet answers that is not accepted; see `accept_fleet`."""
        return self.connection.other_fleet

    def on_other_fleet(self, listener: FleetListener) -> None:
        """Call `listener` with (former, fleet) whenever another fleet answers at the address.

        It is called on the client's event loop; `other_fleet` says the same.
        """
        self.connection.fleet_listeners.append(listener)

    def accept_fleet(self) -> None:
        """Go on with the other fleet that answers: version numbers are its own from now on.

        Until then requests that name a version (`min:V`, `exact:V`, `max-staleness:K`, and a
        publisher's `restore` and `outcome`) raise OtherFleet; others are served. No change: no
        effect.
        """
        self.connection.accept_fleet()

    @property
    def bulk(self) -> str:
        """Endpoint where the weight store serves bytes; empty while none is connected."""
        return self.connection.upstream.bulk

    @property
    def dialer(self) -> Dialer | None:
        """The keys it connects with, if any."""
        return self.connection.dialer

    def ref(self, address: str = ROUTER) -> FleetRef:
        """What to `tell`, `ask` and `stream` at this address.

        Args:
            address: `fleet`, `store`, `worker:NAME`; empty for the router itself. Commands to
                members are answered with a FleetResult, others with their typed result.
        """
        return ActorRef(address, self.connection)

    async def pause(
        self,
        mode: PauseMode = "in_place",
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Stop sampling between two engine steps; requests wait until `resume`.

        `in_place` keeps the KV cache, `retract` drops and recomputes it, `drain` lets running
        requests finish first, `abort` stops them (this client's are resumed later by itself).
        """
        return await self._to_workers(Pause(mode), target, deadline_s, check=check)

    async def resume(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Go on after a pause."""
        return await self._to_workers(Resume(), target, deadline_s, check=check)

    async def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Release engine memory; workers must be idle. Results are `Memory`, in bytes."""
        return await self._to_workers(Sleep(list(tags)), target, deadline_s, check=check)

    async def wake_up(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Take released memory back. Results are `Memory`, in bytes."""
        return await self._to_workers(WakeUp(list(tags)), target, deadline_s, check=check)

    async def flush_cache(
        self,
        tiers: Sequence[CacheTier] = (DEVICE,),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes that no request uses. Results are `Flushed`, in tokens.

        Tiers: `device`, and where an engine has them `host` and `storage`.
        """
        return await self._to_workers(FlushCache(list(tiers)), target, deadline_s, check=check)

    async def reset_prefix_cache(
        self,
        *,
        reset_running_requests: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes on the device. Results are `Flushed`, in tokens.

        With `reset_running_requests` those that run lose theirs, too: they are stopped, and their
        clients have them go on with the tokens that they had.
        """
        if reset_running_requests:
            result = await _reset_with_what_runs(self, target, deadline_s)
            if check:
                _require_somebody(result, FlushCache())
                result.check()
            return result
        return await self.flush_cache(target=target, deadline_s=deadline_s, check=check)

    async def server_info(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Facts and counters of engines. Results are `ServerFacts`."""
        return await self._to_workers(ServerInfo(), target, deadline_s, check=check)

    async def shutdown_worker(
        self, worker: str, *, drain: bool = True, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Make one worker leave, after finishing what it runs if `drain`."""
        return await self._to_workers(Shutdown(drain), worker, deadline_s, check=check)

    async def status(self, *, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table: workers, versions, queue."""
        return await self._to_router(FleetStatus, Status(), deadline_s)

    async def _to_workers(
        self, body: msgspec.Struct, target: str, deadline_s: float, *, check: bool
    ) -> FleetResult:
        ref = self.ref(FLEET if target == FLEET else worker(target))
        deadline_s = deadline_s or self._patience_s
        result = await ref.ask_for(FleetResult, body, deadline_s=deadline_s)
        if check:
            _require_somebody(result, body)
            result.check()
        return result

    async def _to_router(
        self, expected: type[ResultT], body: msgspec.Struct, deadline_s: float
    ) -> ResultT:
        return await self.ref().ask_for(expected, body, deadline_s=deadline_s or self._patience_s)

    @property
    def _patience_s(self) -> float:
        return self.connection.settings.control_deadline_s


def _require_somebody(result: FleetResult, body: msgspec.Struct) -> None:
    """Raise if it reached nobody; a pause and its end are kept for those who join."""
    if not (result.by_worker or result.silent or isinstance(body, Pause | Resume)):
        message = "no worker is there, so nobody did it; `status` tells of those that are"
        raise Refused(Problem("not_ready", message, "not_started", field="target"))


async def _reset_with_what_runs(client: FleetClient, target: str, deadline_s: float) -> FleetResult:
    """Forget every cached prefix: stop what runs, flush, and go on.

    Workers that were paused before stay paused, whatever happens. A worker's result is what went
    wrong first: it may have flushed and still be paused.
    """
    before = await client.status(deadline_s=deadline_s)
    held = {each.name for each in before.workers if each.state == "paused"}
    paused = await client.pause("abort", target=target, deadline_s=deadline_s, check=False)
    results = [paused]
    try:
        results.append(await client.flush_cache(target=target, deadline_s=deadline_s, check=False))
    finally:
        for name in {*paused.by_worker, *paused.silent} - held if held else [target]:
            resumed = await client.resume(target=name, deadline_s=deadline_s, check=False)
            results.append(resumed)
    return _all_of(results)


def _all_of(results: list[FleetResult]) -> FleetResult:
    """The flush's results, and instead of them the first errors of any step."""
    by_worker = dict(results[1].by_worker)
    silent: dict[str, None] = {}
    for result in reversed(results):
        by_worker.update(result.errors)
        silent.update(dict.fromkeys(result.silent))
    return FleetResult(
        {name: each for name, each in by_worker.items() if name not in silent}, list(silent)
    )
