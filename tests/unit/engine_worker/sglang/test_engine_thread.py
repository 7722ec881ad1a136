"""Calls to an engine's loop end: with its answer, or with the engine."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from rolloutbus.engine_worker.engine import EngineDied
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread

DEADLINE_S = 240.0


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    """Its engine is nothing: only the loop is of interest."""
    made = EngineThread(lambda: cast("Any", object()), DEADLINE_S)
    yield made
    made.close(lambda: None)


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _answer() -> int:
    return 7


def test_a_call_returns_what_the_coroutine_returns(thread: EngineThread) -> None:
    assert thread.call(_answer, "answer") == 7


def test_an_engine_that_does_not_answer_in_time_is_dead(thread: EngineThread) -> None:
    thread.timeout_s = 0.05
    with pytest.raises(EngineDied, match=r"no answer to sleep after 0.05 s"):
        thread.call(_never, "sleep")
    with pytest.raises(EngineDied, match="no answer to sleep"):
        thread.call(_answer, "answer")


def test_death_ends_every_call_under_way_and_tells_why(thread: EngineThread) -> None:
    begun = [threading.Event(), threading.Event()]

    async def never(event: threading.Event) -> None:
        event.set()
        await _never()

    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(thread.call, lambda event=event: never(event), "call") for event in begun
        ]
        assert all(event.wait(DEADLINE_S) for event in begun)
        thread.die("out of memory")
        for call in calls:
            with pytest.raises(EngineDied, match="out of memory"):
                call.result(DEADLINE_S)


def test_death_is_told_once_and_with_its_first_cause(thread: EngineThread) -> None:
    told: list[str] = []
    thread.when_dead(lambda: told.append(thread.cause))

    thread.die("first")
    thread.die("second")

    assert told == ["first"]


def test_what_was_begun_is_kept_until_it_ends(thread: EngineThread) -> None:
    begun, may_end, ended = threading.Event(), asyncio.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        await may_end.wait()
        ended.set()

    thread.begin(waits)
    assert begun.wait(DEADLINE_S)
    gc.collect()
    assert len(thread.tasks) == 1
    thread.do(may_end.set)
    assert ended.wait(DEADLINE_S)


def test_nothing_is_begun_by_a_dead_engine(thread: EngineThread) -> None:
    thread.die("gone")

    with pytest.raises(EngineDied, match="gone"):
        thread.begin(_never)
