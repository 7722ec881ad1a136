"""SIGQUIT, by which an engine's own processes say that one of them has failed."""

import asyncio
import signal
from typing import NoReturn

from rolloutbus.engine_worker.engines.shared.step_loop import EngineDied

WORDS_S = 1.0
"""The engine may hear more of it by another way, and then says why it is dead."""


class QuitSignal:
    """Of this process, from now on: it no longer ends the process there and then."""

    def __init__(self) -> None:
        """Needs the running loop of the main thread."""
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._came.set)

    async def watch(self) -> NoReturn:
        """Wait for it.

        Raises:
            EngineDied: it came.
        """
        await self._came.wait()
        await asyncio.sleep(WORDS_S)
        raise EngineDied("one of the engine's processes has failed: it sent SIGQUIT")
