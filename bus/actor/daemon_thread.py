"""Blocking calls that may outlast whoever waits for them.

The pool of `asyncio.to_thread` is joined when the program ends; a call that hangs in somebody
else's code would keep it from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(call: Callable[[], Result], name: str) -> Result:
    """What `call` returns or raises; when this is cancelled, it goes on by itself."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is handed over, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
