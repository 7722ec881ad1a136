"""The thread that SGLang's engine lives on, with the event loop of all calls to it.

SGLang's children die with the thread that started them, and its coroutines belong to one loop: so
one thread builds the engine, runs that loop, and ends with it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import uvloop

from rolloutbus.engine_worker.engine import EngineDied
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangHandle, TokenizerManager

T = TypeVar("T")

CLOSE_S = 60.0


class EngineThread:
    """Builds an engine with `build` and runs coroutines beside it."""

    def __init__(self, build: Callable[[], SglangHandle], timeout_s: float) -> None:
        """Start; returns once the engine is built, or raises what `build` raised.

        Args:
            build: makes the engine, on this thread.
            timeout_s: an engine that has not answered a call after this long is dead.
        """
        self.timeout_s = timeout_s
        self.loop = uvloop.new_event_loop()
        """Of all calls to the engine."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Begun with `begin` and not at their end; the loop's own."""
        self._cause = ""
        self._when_dead: list[Callable[[], None]] = []
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        built: Future[SglangHandle] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), daemon=True)
        self._thread.start()
        self.engine = built.result()

    @property
    def manager(self) -> TokenizerManager:
        """SGLang's tokenizer manager: its methods are to be called on the loop."""
        return self.engine.tokenizer_manager

    @property
    def cause(self) -> str:
        """Why the engine is dead; empty while it lives."""
        return self._cause

    def check(self) -> None:
        """Raise EngineDied if the engine is dead."""
        if self._cause:
            raise EngineDied(self._cause)

    def die(self, cause: str) -> None:
        """The engine is dead: no call returns any more, those under way raise EngineDied."""
        with self._lock:
            if self._cause:
                return
            self._cause = cause
            pending, self._pending = self._pending, set()
        for future in pending:
            if not future.done():
                future.set_exception(EngineDied(cause))
        for call in self._when_dead:
            call()

    def when_dead(self, call: Callable[[], None]) -> None:
        """Have `call` called when the engine dies, from whichever thread finds that out."""
        self._when_dead.append(call)

    def begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine without waiting for it. EngineDied: nothing was started."""
        self.check()
        self.loop.call_soon_threadsafe(self._begin, make)

    def do(self, act: Callable[[], None]) -> None:
        """Call `act` on the engine's loop soon."""
        self.check()
        self.loop.call_soon_threadsafe(act)

    def call(
        self, make: Callable[[], Coroutine[Any, Any, T]], what: str, *, is_patient: bool = False
    ) -> T:
        """Run a coroutine to its end and return its result; for any thread but this one.

        It is never cancelled: the reply to a cancelled control call would be taken for that of the
        next one. `is_patient`: it may take any time.

        Raises:
            EngineDied: the engine is dead, or has not answered in `timeout_s`.
            Exception: what the coroutine raised.
        """
        answer: Future[T] = Future()
        with self._lock:
            self.check()
            self._pending.add(answer)
        self.loop.call_soon_threadsafe(self._start, make, answer)
        try:
            return answer.result(None if is_patient else self.timeout_s)
        except concurrent.futures.TimeoutError:
            if answer.done():
                raise
            self.die(f"no answer to {what} after {self.timeout_s:g} s")
            raise EngineDied(self._cause) from None
        finally:
            with self._lock:
                self._pending.discard(answer)

    async def output_of(self, request: object) -> Any:  # noqa: ANN401 - one output, or a list of one
        """SGLang's last output for a request; empty if there was none. On the loop."""
        last: Any = {}
        async with aclosing(self.manager.generate_request(request, None)) as outputs:
            async for output in outputs:
                last = output
        return last

    def close(self, shut_down: Callable[[], None]) -> None:
        """End the engine with `shut_down`, which may block, and then the thread."""
        self.die("the engine was closed")
        try:
            shut_down()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_S)

    def _begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # The loop itself keeps only weak references.
        task = self.loop.create_task(make())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _start(self, make: Callable[[], Coroutine[Any, Any, T]], answer: "Future[T]") -> None:
        task = self.loop.create_task(make())
        task.add_done_callback(lambda done: _hand_over(done, answer))

    def _run(self, build: Callable[[], SglangHandle], built: "Future[SglangHandle]") -> None:
        asyncio.set_event_loop(self.loop)
        try:
            built.set_result(build())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for it
            built.set_exception(error)
            return
        self.loop.run_forever()


def _hand_over(done: "asyncio.Task[T]", answer: "Future[T]") -> None:
    if answer.done():  # the engine was given up meanwhile
        return
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)
