"""Blocking twins of async objects, for plain scripts: each method is derived from the async one.

A private thread runs the event loop; no signal handlers are touched, so Ctrl-C interrupts the
waiting call, aborts its request, and leaves the client usable.
"""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import uvloop

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import ActorStopped, LocalProtocolError
from rolloutbus.trainer_adapter.client.connection import FORKED

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


LAST_TURNS_S = 1.0
"""What still runs when a loop is stopped has so long to end by itself; then it is cancelled."""


class LoopThread:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        """Id of the process that owns the thread: a forked child has no such thread."""
        self._lock = threading.RLock()
        """Of what follows and the loop's queue; a signal handler may call while it is held."""
        self._is_stopping = False
        """What is submitted from now on would not run."""

    @property
    def is_running(self) -> bool:
        """Whether anything can be waited for."""
        is_here = self._pid == os.getpid()
        return is_here and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._loop, self._pid = uvloop.new_event_loop(), os.getpid()
        self._is_stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop; cancelling the future cancels it.

        Raises:
            ActorStopped: the loop does not run, or runs in another process.
        """
        if self._loop is not None and self.is_running:
            with self._lock:
                if not self._is_stopping:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ActorStopped(self._why_not())

    def check_thread(self) -> None:
        """Refuses to wait here if it would be for ever.

        Raises:
            LocalProtocolError: this is the loop's own thread, which would wait for itself.
        """
        if self.is_running and self._is_own_thread:
            message = "a listener runs in the client's own thread; make blocking calls in another"
            raise LocalProtocolError(message)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it; an interrupt cancels it first.

        Raises:
            ActorStopped: the loop does not run, or runs in another process.
            LocalProtocolError: this is the loop's own thread, which would wait for itself.
        """
        try:
            self.check_thread()
        except LocalProtocolError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function on the loop and waits for it; calls it here if the loop does not run."""
        if not self.is_running or self._is_own_thread:
            return function()

        async def called() -> T:
            return function()

        return self.wait(called())

    def read(self, stream: AsyncGenerator[T]) -> Generator[T]:
        """Yields each item when it arrives; a caller that stops early aborts the request."""
        reading: asyncio.Task[Any] | None = None

        async def item_or_none() -> T | None:
            nonlocal reading
            reading = asyncio.current_task()
            return await anext(stream, None)

        async def close() -> None:
            if reading is not None and not reading.done():  # an interrupt came
                if not reading.cancelling():
                    reading.cancel()
                await asyncio.wait([reading])  # a generator that still runs cannot be closed
            await stream.aclose()

        try:
            while (item := self.wait(item_or_none())) is not None:
                yield item
        finally:
            self.wait(close())

    def stop(self) -> None:
        """End the loop and its thread; idempotent.

        What was submitted before ends, at the latest by being cancelled.
        """
        if self._loop is not None and self._thread is not None and self.is_running:
            with self._lock:
                if not self._is_stopping:
                    self._is_stopping = True
                    self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

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
            loop.run_until_complete(_ended_tasks(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _ended_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Waits a moment for tasks to end by themselves, then cancels the rest."""
    if not tasks:
        return
    _, running = await asyncio.wait(tasks, timeout=LAST_TURNS_S)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@strict()
class Twin(Generic[T]):
    """An async object and the thread that its loop runs in.

    A base class, because each blocking class is one: its derived methods need both.
    """

    def __init__(self, original: T, loop: LoopThread) -> None:
        self.original = original
        """The async object; only to be used on the loop."""
        self.loop = loop


class Derived(Protocol[P, R_co]):
    """What a type checker sees of a derived method: the parameters and the result."""

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R_co]: ...


@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Derived[P, R]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, P], AsyncGenerator[R]],
) -> Derived[P, Generator[R]]: ...
def blocking(method: Callable[..., Any]) -> Any:
    """Returns a `Twin` method that waits for the async method: its result, or each of its items."""
    plain = inspect.unwrap(method)
    returned = inspect.signature(plain).return_annotation
    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        def wait(twin: Twin[Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return twin.loop.wait(plain(twin.original, *args, **kwargs))

        return wait

    @functools.wraps(plain)
    def read(twin: Twin[Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return twin.loop.read(plain(twin.original, *args, **kwargs))

    return _returning(read, Generator[get_args(returned)[0]])


def blocking_overloads(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """`blocking` of a method with overloads: by this a type checker sees each of them."""
    return cast("Callable[Concatenate[Any, P], R]", blocking(method))


def submitted(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Derived[P, Future[R]]:
    """Returns a `Twin` method that begins the async method and gives a future of its result.

    Cancelling the future cancels the call.
    """
    plain = inspect.unwrap(method)

    @functools.wraps(plain)
    def submit(twin: Twin[Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return twin.loop.submit(plain(twin.original, *args, **kwargs))

    returned = inspect.signature(plain).return_annotation
    return cast("Derived[P, Future[R]]", _returning(submit, Future[returned]))


@overload
def at_once(method: Callable[Concatenate[Any, P], R]) -> Derived[P, R]: ...
@overload
def at_once(
    method: Callable[Concatenate[Any, P], T], twin_of: Callable[[T, LoopThread], R]
) -> Derived[P, R]: ...
def at_once(
    method: Callable[..., Any], twin_of: Callable[[Any, LoopThread], Any] | None = None
) -> Any:
    """Returns a `Twin` method that calls this method, which never waits, on the loop.

    Args:
        method: of the async object.
        twin_of: makes the blocking twin of what it returns; None: that is returned as it is.
    """
    plain = inspect.unwrap(method)

    @functools.wraps(plain)
    def call(twin: Twin[Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = twin.loop.call(functools.partial(plain, twin.original, *args, **kwargs))
        return result if twin_of is None else twin_of(result, twin.loop)

    if twin_of is None:
        return call
    return _returning(call, twin_of if isinstance(twin_of, type) else inspect.Signature.empty)


def _returning(function: Callable[..., Any], kind: Any) -> Any:  # noqa: ANN401 - any annotation
    """Sets the return annotation of a function."""
    function.__signature__ = inspect.signature(function).replace(return_annotation=kind)  # pyright: ignore[reportFunctionMemberAccess]
    return function
