"""The event loop that an object belongs to.

Futures of one loop, awaited in another, resolve when the other happens to wake: nothing fails, and
nothing moves. So whoever comes from another loop is told.
"""

import asyncio

from rolloutbus.bus.wire.errors import WrongEventLoop


class HomeLoop:
    """Remembers the loop that an object was opened on; until then any will do."""

    def __init__(self, what: str) -> None:
        """`what` the object is, for the error."""
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None

    def settle(self) -> None:
        """The object belongs to the running loop from now on.

        Raises:
            WrongEventLoop: it belongs to another one.
        """
        self.require()
        self._loop = asyncio.get_running_loop()

    def leave(self) -> None:
        """The object is closed: it belongs to none."""
        self._loop = None

    @property
    def away(self) -> asyncio.AbstractEventLoop | None:
        """The object's loop, if this is called from elsewhere; None if all is well."""
        return None if self._loop is None or self._loop is _running() else self._loop

    def require(self) -> None:
        """Do nothing on the object's own loop.

        Raises:
            WrongEventLoop: this is another loop, or none; the object's state is as before.
        """
        home = self.away
        if home is None:
            return
        here = "from another event loop" if _running() is not None else "outside of any event loop"
        if home.is_closed():
            advice = "its own is closed; make a new one inside the loop that runs"
        else:
            advice = (
                "use it on the loop that opened it (asyncio.run_coroutine_threadsafe), or make "
                "another one here; plain scripts and threads take `connect_sync`"
            )
        raise WrongEventLoop(f"this {self._what} was called {here}: {advice}")


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
