"""Steps from the engine's thread become columns on the loop, several at a time."""

import asyncio
import threading

import numpy as np

from bus.codec import unpack
from bus.entry import Entry
from bus.ids import AttemptKey, RequestId
from bus.messages.stream import Deltas
from engine_worker.engine import Step
from engine_worker.step_buffer import StepBuffer

A: AttemptKey = (RequestId("c/1"), (1, 1))
B: AttemptKey = (RequestId("c/2"), (1, 2))
DEADLINE_S = 60.0


def columns(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def logprobs(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


async def said(steps: list[Step], prefix: int = 0) -> Deltas:
    arrived: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
    buffer = StepBuffer(arrived.set_result)
    buffer.begin(A, prefix)
    buffer.begin(B, 0)

    def engine() -> None:
        for step in steps:
            buffer.sink(step)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    async with asyncio.timeout(DEADLINE_S):
        body = unpack(await arrived)
    assert isinstance(body, Deltas)
    return body


async def test_waiting_steps_are_merged_in_order() -> None:
    body = await said(
        [
            Step([A, B], [1, 1], columns(5, 6), logprobs(-1, -2), 3),
            Step([A, B], [2, 1], columns(7, 8, 9), logprobs(-3, -4, -5), 4, [(1, "stop")]),
        ],
        prefix=10,
    )
    assert body.rids == ["c/1", "c/2", "c/1", "c/2"]
    assert body.attempts == [(1, 1), (1, 2), (1, 1), (1, 2)]
    assert body.seqs == [10, 0, 11, 1]
    assert body.counts == [1, 1, 2, 1]
    assert np.frombuffer(body.tokens, np.int32).tolist() == [5, 6, 7, 8, 9]
    assert body.versions == [3, 3, 4, 4]
    assert body.finishes == [(3, "stop")]
    assert body.behaviour_logprobs == b""


async def test_logprobs_stand_in_where_only_some_steps_truncate() -> None:
    body = await said(
        [
            Step([A], [1], columns(5), logprobs(-1), 0),
            Step([A], [1], columns(6), logprobs(-2), 0, behaviour_logprobs=logprobs(-0.5)),
        ]
    )
    assert np.frombuffer(body.behaviour_logprobs, np.float32).tolist() == [-1, -0.5]


async def test_finished_request_is_not_open_any_more() -> None:
    arrived: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
    buffer = StepBuffer(arrived.set_result)
    buffer.begin(A, 0)
    assert buffer.open_key("c/1") == A
    buffer.sink(Step([A], [1], columns(5), logprobs(-1), 0, [(0, "length")]))
    await arrived
    assert buffer.open_key("c/1") is None
