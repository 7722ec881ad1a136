"""Work in a thread of its own."""

import asyncio
import contextlib
import gc
import threading
import weakref

from rolloutbus.bus.actor.loop import in_daemon_thread

NAME = "rolloutbus-test-of-errors"


class Large:
    """Stands for gigabytes that the work held."""


async def test_an_error_keeps_nothing_that_the_work_held() -> None:
    held: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError(f"no room beside {type(large).__name__}")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):  # pytest.raises would remember the error
            await in_daemon_thread(fail, NAME)
        for each in threading.enumerate():
            if each.name == NAME:
                await asyncio.to_thread(each.join)
        await asyncio.sleep(0)  # the loop holds what it wakes this test with until it waits again
        assert held[0]() is None
    finally:
        gc.enable()
