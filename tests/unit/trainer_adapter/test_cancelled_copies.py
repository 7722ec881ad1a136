"""Work in a thread that is cancelled: nobody goes on before it has ended."""

import asyncio
import threading

import pytest

from rolloutbus.trainer_adapter.publisher.weight_writer import in_thread

DEADLINE_S = 30.0
N_TURNS = 20
"""Of the event loop: more than any cancellation takes."""


async def turns() -> None:
    for _ in range(N_TURNS):
        await asyncio.sleep(0)


@pytest.mark.parametrize("n_cancels", [1, 2, 3])
async def test_it_is_waited_for_however_often_it_is_cancelled(n_cancels: int) -> None:
    has_begun, may_end, was_stopped = (threading.Event() for _ in range(3))

    def copy() -> None:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)

    copying = asyncio.create_task(in_thread(copy, was_stopped.set))
    assert await asyncio.to_thread(has_begun.wait, DEADLINE_S)
    for _ in range(n_cancels):
        copying.cancel()
        await turns()
    assert was_stopped.is_set()
    assert not copying.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(DEADLINE_S):
            await copying
