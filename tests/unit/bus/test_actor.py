"""An actor tells its core the time, carries out its effects in order, and ends exactly once."""

import asyncio
from collections.abc import Sequence

import pytest

from rolloutbus.bus.actor.loop import Actor, ManualClock, one_by_one

NEVER_S = 3600.0
DEADLINE_S = 60.0


class Echo:
    """A core that wants done what it hears, and the list of what was done."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.done: list[str] = []
        self.crashes: list[Exception] = []
        self.kept = ""
        self.ticked_thrice = asyncio.Event()
        self.flushed = asyncio.Event()

    def actor(self, *, tick_s: float = NEVER_S, flushes: bool = False) -> Actor[str]:
        return Actor(
            one_by_one(self._apply),
            clock=self.clock,
            tick=self.tick,
            tick_s=tick_s,
            flush=self.flush if flushes else None,
            on_crash=self.crashes.append,
        )

    def hear(self, words: str, now: float) -> list[str]:
        return [f"{word}@{now:g}" for word in words.split()]

    def tick(self, now: float) -> list[str]:
        if len(self.done) == 2:
            self.ticked_thrice.set()
        return [f"tick@{now:g}"]

    def keep(self, word: str, now: float) -> Sequence[str]:
        self.kept += word
        return self.hear(word, now)

    def flush(self, now: float) -> list[str]:
        self.flushed.set()
        kept, self.kept = self.kept, ""
        return [f"flushed {kept}@{now:g}"]

    def _apply(self, effect: str) -> None:
        if effect.startswith("bad"):
            raise KeyError(effect)
        self.done.append(effect)


async def test_effects_are_carried_out_in_order_with_the_clocks_time() -> None:
    echo = Echo()
    actor = echo.actor()
    actor.feed(echo.hear, "a b")
    echo.clock.advance(5)
    actor.feed(echo.hear, "c")
    assert echo.done == ["a@100", "b@100", "c@105"]


async def test_it_ticks_from_its_start_until_it_stops() -> None:
    echo = Echo()
    actor = echo.actor(tick_s=0.001)
    assert not echo.done
    await _ticks_thrice(actor, echo)
    actor.stop("enough")
    n_ticks = len(echo.done)
    assert await actor.stopped() == "enough"
    other = Echo()
    await _ticks_thrice(other.actor(tick_s=0.001), other)
    assert len(echo.done) == n_ticks


async def test_a_flush_comes_once_at_the_end_of_the_turn() -> None:
    echo = Echo()
    actor = echo.actor(flushes=True)
    actor.feed(echo.keep, "a")
    actor.feed(echo.keep, "b")
    assert echo.done == ["a@100", "b@100"]
    async with asyncio.timeout(DEADLINE_S):
        await echo.flushed.wait()
    assert echo.done == ["a@100", "b@100", "flushed ab@100"]


async def test_the_last_turn_is_flushed_too() -> None:
    echo = Echo()
    actor = echo.actor(flushes=True)
    actor.feed(echo.keep, "a")
    actor.stop("done")
    await asyncio.sleep(0)  # the flush comes at the end of this turn of the loop
    assert echo.done[-1] == "flushed a@100"


@pytest.mark.parametrize("words", ["good bad", "bad good"])
async def test_an_effect_that_raises_ends_the_actor_and_whoever_waits(words: str) -> None:
    echo = Echo()
    actor = echo.actor()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(_error_of(actor)) for _ in range(2)]
        await asyncio.sleep(0)  # lets both begin to wait
        actor.feed(echo.hear, words)
    assert all(isinstance(task.result(), KeyError) for task in waiting)
    assert len(echo.crashes) == 1
    assert not actor.is_running


async def test_a_core_that_raises_ends_the_actor_and_hears_no_more() -> None:
    echo = Echo()
    actor = echo.actor()
    actor.feed(_broken)
    actor.feed(echo.hear, "late")
    actor.carry_out(["later"])
    assert isinstance(await _error_of(actor), ZeroDivisionError)
    assert echo.done == []


async def test_the_first_ending_counts() -> None:
    actor = Echo().actor()
    actor.stop("first")
    actor.stop("second")
    actor.crash(ValueError("third"))
    assert await actor.stopped() == "first"


async def test_a_waiter_that_gives_up_does_not_end_the_actor() -> None:
    actor = Echo().actor()
    waiter = asyncio.create_task(actor.stopped())
    await asyncio.sleep(0)  # lets it begin to wait
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert actor.is_running


async def _ticks_thrice(actor: Actor[str], echo: Echo) -> None:
    actor.start()
    async with asyncio.timeout(DEADLINE_S):
        await echo.ticked_thrice.wait()


def _broken(now: float) -> list[str]:
    return [str(now / 0)]


async def _error_of(actor: Actor[str]) -> Exception | None:
    try:
        await actor.stopped()
    except (KeyError, ZeroDivisionError) as error:
        return error
    return None
