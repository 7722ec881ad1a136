"""The client of the bus for plain scripts: the same names, blocking.

A private thread runs the event loop; no signal handlers are touched, so Ctrl-C interrupts the
waiting call, aborts its request, and leaves the client usable.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import uvloop

from bus.errors import ActorStopped
from bus.messages.control import FleetStatus, MemoryTag, PauseMode
from bus.messages.generation import DetachedRequest, Sampling
from bus.ref import FLEET
from trainer_adapter.client import WEIGHTS_DEADLINE_S, RolloutClient, settings_for
from trainer_adapter.rollout import Delta, FleetResult, Rollout
from trainer_adapter.rollouts import DEFAULT_DEADLINE_S, GenerateOptions, Prompt
from trainer_adapter.session import Session, SessionOptions
from trainer_adapter.settings import ClientSettings
from trainer_adapter.weight_queries import ActiveTensor
from trainer_adapter.weights_report import WeightsReport

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
        self, mode: PauseMode = "in_place", *, target: str = FLEET, deadline_s: float = 0.0
    ) -> FleetResult:
        """Stop sampling between two engine steps."""
        return self.run(self._client.pause(mode, target=target, deadline_s=deadline_s))

    def resume(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Go on after a pause."""
        return self.run(self._client.resume(target=target, deadline_s=deadline_s))

    def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
    ) -> FleetResult:
        """Release engine memory."""
        return self.run(self._client.sleep(tags, target=target, deadline_s=deadline_s))

    def wake_up(
        self,
        tags: Sequence[MemoryTag] = ("weights", "kv_cache"),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
    ) -> FleetResult:
        """Take released memory back."""
        return self.run(self._client.wake_up(tags, target=target, deadline_s=deadline_s))

    def flush_cache(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Forget cached prefixes that no request uses."""
        return self.run(self._client.flush_cache(target=target, deadline_s=deadline_s))

    def server_info(self, *, target: str = FLEET, deadline_s: float = 0.0) -> FleetResult:
        """Facts and counters of engines."""
        return self.run(self._client.server_info(target=target, deadline_s=deadline_s))

    def shutdown_worker(
        self, worker: str, *, drain: bool = True, deadline_s: float = 0.0
    ) -> FleetResult:
        """Make one worker leave."""
        return self.run(self._client.shutdown_worker(worker, drain=drain, deadline_s=deadline_s))

    def status(self, *, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table."""
        return self.run(self._client.status(deadline_s=deadline_s))


class SyncSession:
    """Blocking turns of one session; see `Session`, which is behind it as `session`."""

    def __init__(self, client: SyncFleetClient, session: Session) -> None:
        self._client = client
        self.session = session
        """Where it is, and how often it moved."""

    def generate(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """The next turn."""
        return self._client.run(self.session.generate(prompt, sampling, **options))

    def renew(self) -> None:
        """Let lease and grace begin anew."""
        self._client.run(self.session.renew())


class SyncRolloutClient(SyncFleetClient):
    """Blocking rollouts; see `RolloutClient` for what each method promises. A context manager."""

    def generate(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """Sample one continuation of `prompt`, int32 [n_prompt_tokens]."""
        return self.run(self.async_client.generate(prompt, sampling, **options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Rollout]]:
        """Sample `n` continuations of each prompt: one list per prompt."""
        return self.run(self.async_client.generate_batch(prompts, sampling, n=n, **options))

    def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta]:
        """Stream tokens; leaving the iterator early aborts the request."""
        yield from self._read(self.async_client.stream(prompt, sampling, **options))

    def reattach(self, *, deadline_s: float = 0.0) -> list[DetachedRequest]:
        """Name the detached requests of this client's name."""
        return self.run(self.async_client.reattach(deadline_s=deadline_s))

    def collect(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Rollout:
        """Wait for the result of a detached request."""
        return self.run(self.async_client.collect(rid, deadline_s=deadline_s))

    def follow(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Generator[Delta]:
        """Stream a detached request from its first token on."""
        yield from self._read(self.async_client.follow(rid, deadline_s=deadline_s))

    def check_weights(
        self,
        names: Sequence[str] = (),
        *,
        target: str = FLEET,
        deadline_s: float = WEIGHTS_DEADLINE_S,
    ) -> WeightsReport:
        """Compare the active weights of workers by digest."""
        check = self.async_client.check_weights(names, target=target, deadline_s=deadline_s)
        return self.run(check)

    def get_weights(
        self, name: str, worker: str, *, deadline_s: float = WEIGHTS_DEADLINE_S
    ) -> ActiveTensor:
        """The bytes of one tensor as a worker has it active."""
        return self.run(self.async_client.get_weights(name, worker, deadline_s=deadline_s))

    def abort(self, rids: Iterable[str] | None = None) -> int:
        """Stop these requests (None: everything this client samples). Returns how many."""
        return self.run(self.async_client.abort(rids))

    def _read(self, deltas: AsyncGenerator[Delta]) -> Generator[Delta]:
        try:
            while (delta := self.run(anext(deltas, None))) is not None:
                yield delta
        finally:
            self.run(deltas.aclose())

    @contextmanager
    def session(
        self, name: str, *, wait_s: float = 0.0, **options: Unpack[SessionOptions]
    ) -> Generator[SyncSession]:
        """Open a session for the length of a `with`; see `RolloutClient.session`."""
        session = self.async_client.session(name, wait_s=wait_s, **options)
        self.run(session.__aenter__())
        try:
            yield SyncSession(self, session)
        finally:
            self.run(session.__aexit__(None, None, None))


def connect_sync(address: str, *, name: str = "", key_file: str | Path = "") -> SyncRolloutClient:
    """Make a blocking client; use it with `with`. Arguments as of `connect`."""
    return SyncRolloutClient(settings_for(address, name, key_file))
