"""Control of the fleet for plain scripts: the same names, blocking.

A private thread runs the event loop; no signal handlers are touched, so Ctrl-C interrupts the
waiting call, aborts its request, and leaves the client usable.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, Self, TypeVar

import uvloop

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import ActorStopped, LocalProtocolError, cannot_be_pickled
from rolloutbus.bus.wire.messages.control import (
    DEVICE,
    CacheTier,
    FleetStatus,
    MemoryTag,
    PauseMode,
)
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.connection import FORKED, FleetListener
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged
from rolloutbus.trainer_adapter.client.rollout import FleetResult
from rolloutbus.trainer_adapter.client.settings import ClientSettings

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        """Whose thread it is: a forked child has none."""

    @property
    def is_running(self) -> bool:
        """Whether anything can be waited for."""
        is_here = self._pid == os.getpid()
        return is_here and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._loop, self._pid = uvloop.new_event_loop(), os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt cancels it first."""
        if self._loop is None or not self.is_running:
            coroutine.close()
            raise ActorStopped(self._why_not())
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread; idempotent."""
        if self._loop is not None and self._thread is not None and self.is_running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _why_not(self) -> str:
        if self._thread is None:
            return "the client is not open; use `with`, or `open()` and `close()`"
        if self._pid != os.getpid():
            return FORKED.format(pid=self._pid)
        return "the client is closed"

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


@strict()
class SyncFleetClient:
    """Blocking control of the fleet; see `FleetClient` for what each method promises."""

    def __init__(self, settings: ClientSettings) -> None:
        self._thread = LoopThread(f"rolloutbus-{settings.name}")
        self._client = RolloutClient(settings)

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the address {self._client.connection.settings.router!r} and connect there"
        )

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Connect, for whom a `with` is too short; `close` ends it. See `FleetClient.open`."""
        if self._thread.is_running:
            raise LocalProtocolError("the client is open already; a client opens once")
        self._thread.start()
        try:
            self._thread.wait(self._client.open())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def close(self) -> None:
        """Leave: what is open is stopped. Once is enough."""
        if self._thread.is_running:
            try:
                self._thread.wait(self._client.close())
            finally:
                self._thread.stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run anything else that uses `async_client` on its loop, e.g. what its refs are asked.

        Raises:
            ActorStopped: the client is not open, or was opened before this process was forked.
        """
        return self._thread.wait(coroutine)

    @property
    def fleet(self) -> str:
        """Identity of the fleet, e.g. for `connect(fleet=…)`; empty before the router told it."""
        return self._client.connection.fleet

    @property
    def other_fleet(self) -> FleetChanged | None:
        """(former, fleet) while a fleet answers that is not accepted; see `accept_fleet`."""
        return self._client.connection.other_fleet

    def on_other_fleet(self, listener: FleetListener) -> None:
        """Call `listener` with (former, fleet) whenever another fleet answers at the address.

        It is called in the client's thread, and must not call the client there.
        """
        self._client.connection.fleet_listeners.append(listener)

    def accept_fleet(self) -> None:
        """Go on with the other fleet that answers: version numbers are its own from now on.

        Until then requests that name a version (`min:V`, `exact:V`, `max-staleness:K`, and a
        publisher's `restore` and `outcome`) raise OtherFleet; others are served. No change: no
        effect.
        """
        self._client.connection.accept_fleet()

    @property
    def async_client(self) -> RolloutClient:
        """The client behind this one; only to be used on its own loop, through `run`."""
        return self._client

    def pause(
        self,
        mode: PauseMode = "in_place",
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Stop sampling between two engine steps."""
        return self.run(self._client.pause(mode, target=target, deadline_s=deadline_s, check=check))

    def resume(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Go on after a pause."""
        return self.run(self._client.resume(target=target, deadline_s=deadline_s, check=check))

    def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Release engine memory."""
        return self.run(self._client.sleep(tags, target=target, deadline_s=deadline_s, check=check))

    def wake_up(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Take released memory back."""
        return self.run(
            self._client.wake_up(tags, target=target, deadline_s=deadline_s, check=check)
        )

    def flush_cache(
        self,
        tiers: Sequence[CacheTier] = (DEVICE,),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes that no request uses."""
        return self.run(
            self._client.flush_cache(tiers, target=target, deadline_s=deadline_s, check=check)
        )

    def reset_prefix_cache(
        self,
        *,
        reset_running_requests: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes, also those of requests that run if that is asked for."""
        reset = self._client.reset_prefix_cache(
            reset_running_requests=reset_running_requests,
            target=target,
            deadline_s=deadline_s,
            check=check,
        )
        return self.run(reset)

    def server_info(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Facts and counters of engines."""
        return self.run(self._client.server_info(target=target, deadline_s=deadline_s, check=check))

    def shutdown_worker(
        self, worker: str, *, drain: bool = True, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Make one worker leave."""
        return self.run(
            self._client.shutdown_worker(worker, drain=drain, deadline_s=deadline_s, check=check)
        )

    def status(self, *, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table."""
        return self.run(self._client.status(deadline_s=deadline_s))
