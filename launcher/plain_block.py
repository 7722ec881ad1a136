"""A fleet in a plain `with`: its `async with` runs on a loop in a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from rolloutbus.trainer_adapter.client.blocking import LoopThread

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PlainBlock:
    """Enters an async context manager for a program without `asyncio`, and leaves it again."""

    def __init__(self, entered: AbstractAsyncContextManager[Any], name: str) -> None:
        self._manager = entered
        self._loop = LoopThread(name)
        self._is_entered: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._block: concurrent.futures.Future[None] | None = None
        self._leave: Callable[[], object] = lambda: None
        """Has the block end: cancels its beginning, and afterwards lets it go."""

    def enter(self) -> None:
        """Returns when the block has begun; raises what its beginning raises."""
        self._loop.start()
        self._block = block = self._loop.submit(self._run())
        try:
            concurrent.futures.wait(
                (self._is_entered, block), return_when=concurrent.futures.FIRST_COMPLETED
            )
        except BaseException:  # an interrupt
            with contextlib.suppress(concurrent.futures.CancelledError):
                self.leave()
            raise
        if not self._is_entered.done():
            self.leave()
        block.add_done_callback(self._ended)

    def leave(self) -> None:
        """Ends the block; raises what it ended with, if that was before."""
        block, self._block = self._block, None
        if block is None:
            return
        try:
            self._loop.call(self._let_go)
            block.result()
        finally:
            self._loop.stop()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work inside of the block, and waits for it; an interrupt cancels it."""
        return self._loop.wait(work)

    async def _run(self) -> None:
        task, leaving = asyncio.current_task(), asyncio.Event()
        assert task is not None
        self._leave = task.cancel
        async with self._manager:
            self._leave = leaving.set
            self._is_entered.set_result(None)
            await leaving.wait()

    def _let_go(self) -> None:
        self._leave()  # looked up on the loop: there the block's task has begun by now

    def _ended(self, block: "concurrent.futures.Future[None]") -> None:
        """Tells at once of a block that ended by itself; its own program may be waiting."""
        error = None if block.cancelled() else block.exception()
        if error is not None and self._block is not None:
            _log.error("%s; leaving the `with` block raises it", error)
