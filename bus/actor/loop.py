"""The loop around a core, its clock, and its event loop: events and the time in, effects out.

Sockets and processes belong to the shell that makes the actor. An error in here is a bug and ends
the actor: its callers get their endings, and nothing goes on half done.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar, TypeVarTuple, Unpack

from rolloutbus.bus.wire.errors import WrongEventLoop

Result = TypeVar("Result")


async def in_daemon_thread(call: Callable[[], Result], name: str) -> Result:
    """What `call` returns or raises; when this is cancelled, it goes on by itself."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(future)
    threading.Thread(target=_hand_over, args=(call, future), name=name, daemon=True).start()
    # An error remembers the frames that it came through. One that leads back to it would keep all
    # that they hold, gigabytes of weights for example, until somebody collects garbage.
    del call, future
    try:
        return await waiting
    finally:
        del waiting


def _hand_over(call: Callable[[], Result], future: "Future[Result]") -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is handed over, whatever it is
        future.set_exception(error)
    finally:
        del call, future


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


class Clock(Protocol):
    """Seconds since some fixed moment; only differences mean anything."""

    def now(self) -> float:
        """Seconds."""
        ...


class BootClock:
    """CLOCK_BOOTTIME: unlike CLOCK_MONOTONIC it counts time asleep, so leases expire meanwhile."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """Stands still until it is advanced."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds, as last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        if seconds < 0:
            msg = "a clock only moves forward"
            raise ValueError(msg)
        self._now += seconds


EffectT = TypeVar("EffectT")
Event = TypeVarTuple("Event")

CoreCall = Callable[[float], Sequence[EffectT]]
"""A core's method that needs nothing but the time, in seconds."""


def one_by_one(apply: Callable[[EffectT], None]) -> Callable[[Sequence[EffectT]], None]:
    """For a shell that carries out each effect by itself."""

    def apply_all(effects: Sequence[EffectT]) -> None:
        for effect in effects:
            apply(effect)

    return apply_all


def _not_shown(_: Exception) -> None:
    """The crash is reported by `stopped` alone."""


class Actor(Generic[EffectT]):
    """One core on the running event loop. Ends once: by `stop` or by a crash."""

    def __init__(
        self,
        apply_all: Callable[[Sequence[EffectT]], None],
        *,
        clock: Clock,
        tick: CoreCall[EffectT],
        tick_s: float,
        flush: CoreCall[EffectT] | None = None,
        on_crash: Callable[[Exception], None] = _not_shown,
    ) -> None:
        """Make it; it takes events at once, and ticks from `start` on.

        Args:
            apply_all: carries out effects, in order; see `one_by_one`.
            clock: the time for the core.
            tick: tells the core that time has passed.
            tick_s: seconds from one tick to the next.
            flush: asked once at the end of each loop turn in which something happened: what the
                core collected meanwhile.
            on_crash: called at once when core or effects raise, so that callers get their ending.
        """
        self._loop = asyncio.get_running_loop()
        self._apply_all = apply_all
        self._clock = clock
        self._tick_core = tick
        self._tick_s = tick_s
        self._flush_core = flush
        self._on_crash = on_crash
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._is_flush_due = False

    @property
    def is_running(self) -> bool:
        """Whether it takes events."""
        return not self._ending.done()

    def start(self) -> None:
        """Tick, now and every `tick_s` seconds until it ends."""
        self._tick()

    def feed(
        self, event: Callable[[Unpack[Event], float], Sequence[EffectT]], *what: *Event
    ) -> None:
        """Call the core's method with `what` and the time; carry out what it wants.

        An actor that has ended takes no events: they are dropped.
        """
        if self._ending.done():
            return
        try:
            effects = event(*what, self._clock.now())
            # Asked for before anything is sent: what the flush adds then goes out in the same
            # frame, ahead of the port's own end of the turn.
            if self._flush_core is not None and not self._is_flush_due:
                self._is_flush_due = True
                self._loop.call_soon(self._flush, self._flush_core)
            self._apply_all(effects)
        except Exception as error:  # noqa: BLE001 - a crash is the actor's ending
            self.crash(error)

    def carry_out(self, effects: Sequence[EffectT]) -> None:
        """Carry out effects of a core's method that its caller had to call itself."""
        self.feed(lambda _: effects)

    def stop(self, reason: str) -> None:
        """End it, because of `reason`; effects under way are still carried out."""
        if not self._ending.done():
            self._ending.set_result(reason)
            self._cancel_timer()

    def crash(self, error: Exception) -> None:
        """End it with an error: its core, its effects or its shell have a bug."""
        if not self._ending.done():
            self._ending.set_exception(error)
            self._cancel_timer()
            self._on_crash(error)

    async def stopped(self) -> str:
        """Wait for its end; returns the reason.

        Raises:
            Exception: what it crashed with.
        """
        return await asyncio.shield(self._ending)

    def _flush(self, flush_core: CoreCall[EffectT]) -> None:
        # Also after `stop`: these are the last words of the turn in which it stopped.
        if self._ending.done() and self._ending.exception() is not None:
            return
        try:
            effects = flush_core(self._clock.now())
            if effects:
                self._apply_all(effects)
        except Exception as error:  # noqa: BLE001 - a crash is the actor's ending
            self.crash(error)
        self._is_flush_due = False

    def _tick(self) -> None:
        if not self._ending.done():
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            self.feed(self._tick_core)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
