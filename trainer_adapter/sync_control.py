"""Control of the fleet for plain scripts: the same names, blocking.

A private thread runs the event loop; no signal handlers are touched, so Ctrl-C interrupts the
waiting call, aborts its request, and leaves the client usable.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from bus.errors import ActorStopped
from bus.messages.control import DEVICE, CacheTier, FleetStatus, MemoryTag, PauseMode
from bus.ref import FLEET
from bus.strict_calls import strict
from trainer_adapter.client import RolloutClient
from trainer_adapter.rollout import FleetResult
from trainer_adapter.settings import ClientSettings

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt cancels it first."""
        if not self._thread.is_alive():
            coroutine.close()
            raise ActorStopped("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


@strict()
class SyncFleetClient:
    """Blocking control of the fleet; see `FleetClient` for what each method promises."""

    def __init__(self, settings: ClientSettings) -> None:
        self._thread = LoopThread(f"rolloutbus-{settings.name}")
        self._client = RolloutClient(settings)

    def __enter__(self) -> Self:
        try:
            self._thread.wait(self._client.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._thread.wait(self._client.__aexit__(kind, error, trace))
        finally:
            self._thread.stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run anything else that uses `async_client` on its loop, e.g. what its refs are asked."""
        return self._thread.wait(coroutine)

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
