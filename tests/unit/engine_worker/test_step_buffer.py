"""Steps from the engine's thread become columns on the loop, several at a time."""

import asyncio
import threading
from typing import Any, cast

import numpy as np
import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES, MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Array, Deltas
from rolloutbus.bus.wire.messages.host import Extras
from rolloutbus.engine_worker.engine import Step, began_with
from rolloutbus.engine_worker.host.step_buffer import StepBuffer

A: AttemptKey = (RequestId("c/1"), (1, 1))
B: AttemptKey = (RequestId("c/2"), (1, 2))
C: AttemptKey = (RequestId("c/3"), (1, 3))
DEADLINE_S = 60.0


def columns(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def logprobs(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


async def entries_of(steps: list[Step], n_prefix: int = 0) -> list[Entry]:
    """Everything said of these steps, which wait when they are read; `deltas` come last."""
    found: list[Entry] = []
    is_over = asyncio.Event()

    def take(entry: Entry) -> None:
        found.append(entry)
        if entry.kind == "deltas":
            is_over.set()

    buffer = StepBuffer(take)
    buffer.begin(A, n_prefix)
    buffer.begin(B, 0)
    for step in steps:
        buffer.sink(step)
    async with asyncio.timeout(DEADLINE_S):
        await is_over.wait()
    return found


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


async def test_steps_that_truncate_nothing_have_no_numbers_beside_those_that_do() -> None:
    body = await said(
        [
            Step([A], [1], columns(5), logprobs(-1), 0),
            Step([A], [1], columns(6), logprobs(-2), 0, behaviour_logprobs=logprobs(-0.5)),
        ]
    )
    first, second = np.frombuffer(body.behaviour_logprobs, np.float32).tolist()
    assert np.isnan(first)
    assert second == -0.5


async def test_finished_request_is_not_open_any_more() -> None:
    arrived: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
    buffer = StepBuffer(arrived.set_result)
    buffer.begin(A, 0)
    assert buffer.open_key("c/1") == A
    buffer.sink(Step([A], [1], columns(5), logprobs(-1), 0, [(0, "length")]))
    await arrived
    assert buffer.open_key("c/1") is None


def array(n_bytes: int) -> Array:
    return Array("uint8", (n_bytes,), bytes(n_bytes))


async def test_arrays_of_a_request_go_before_the_step_that_ends_it() -> None:
    states = {"hidden_states": array(16)}
    found = await entries_of(
        [
            Step([A, B], [1, 1], columns(5, 6), logprobs(-1, -2), 3),
            Step([A], [1], columns(7), logprobs(-3), 3, [(0, "stop")], arrays=[(0, states)]),
        ]
    )
    assert [(entry.kind, entry.rid) for entry in found] == [("extras", "c/1"), ("deltas", "")]
    extras = unpack(found[0])
    assert extras == Extras("c/1", (1, 1), states)


async def test_the_adapter_of_a_request_goes_before_its_first_tokens() -> None:
    found = await entries_of(
        [began_with(A, "judge@5"), Step([A], [1], columns(7), logprobs(-3), 3)]
    )
    assert [(entry.kind, entry.rid) for entry in found] == [("extras", "c/1"), ("deltas", "")]
    assert unpack(found[0]) == Extras("c/1", (1, 1), lora="judge@5")


@pytest.mark.parametrize("lora", ["judge", "judge@", 5])
async def test_an_adapter_without_its_version_ends_the_request(lora: str) -> None:
    found = await entries_of([began_with(A, lora)])
    assert [(entry.kind, entry.rid) for entry in found] == [("failed", "c/1"), ("deltas", "")]


async def test_a_request_that_the_engine_gives_up_fails_with_its_problem() -> None:
    why = Problem("bad_request", "no such thing", "not_started")
    buffered = Step([A, B], [0, 1], columns(6), logprobs(-2), 3, problems=[(0, why)])
    found = await entries_of([buffered])
    assert [(entry.kind, entry.rid, entry.attempt) for entry in found] == [
        ("failed", "c/1", (1, 1)),
        ("deltas", "", (0, 0)),
    ]
    assert unpack(found[0]) == why


async def test_a_request_that_was_given_up_is_not_open_any_more() -> None:
    arrived: asyncio.Queue[Entry] = asyncio.Queue()
    buffer = StepBuffer(arrived.put_nowait)
    buffer.begin(A, 0)
    why = Problem("busy", "full", "not_started")
    buffer.sink(Step([A], [0], columns(), logprobs(), 0, problems=[(0, why)]))
    async with asyncio.timeout(DEADLINE_S):
        await arrived.get()
    assert buffer.open_key("c/1") is None


@pytest.mark.parametrize(
    ("sizes", "n_prefix"),
    [
        ([MAX_PIECE_BYTES + 1], 0),
        ([MAX_PIECE_BYTES, MAX_BODY_BYTES - MAX_PIECE_BYTES], 0),
        ([MAX_PIECE_BYTES], (MAX_BODY_BYTES - MAX_PIECE_BYTES) // 12),
    ],
)
async def test_a_result_that_no_body_can_hold_fails_instead(
    sizes: list[int], n_prefix: int
) -> None:
    arrays = {f"a{n}": array(size) for n, size in enumerate(sizes)}
    step = Step([A], [1], columns(7), logprobs(-3), 3, [(0, "stop")], arrays=[(0, arrays)])
    found = await entries_of([step], n_prefix)
    assert [entry.kind for entry in found] == ["failed", "deltas"]
    problem = unpack(found[0])
    assert isinstance(problem, Problem)
    assert (problem.code, problem.outcome) == ("result_too_large", "failed")
    assert (problem.field, "a0" in problem.message) == ("want", True)


async def test_the_largest_array_fits_into_a_result() -> None:
    arrays = {"a": array(MAX_PIECE_BYTES)}
    step = Step([A], [1], columns(7), logprobs(-3), 3, [(0, "stop")], arrays=[(0, arrays)])
    assert [entry.kind for entry in await entries_of([step])] == ["extras", "deltas"]


WRONG: dict[str, dict[str, Any]] = {
    "wide logprobs": {"logprobs": np.array([-1, -2], np.float64)},
    "wide tokens": {"tokens": np.array([5, 6], np.int64)},
    "a list": {"tokens": [5, 6]},
    "too few tokens": {"tokens": columns(5)},
    "no counts": {"counts": [1]},
    "a negative count": {"counts": [3, -1]},
    "a count of no type": {"counts": [1, "1"]},
    "no version": {"version": None},
    "a version below 0": {"version": -1},
    "a version above uint64": {"version": 1 << 64},
    "behaviour of another size": {"behaviour_logprobs": logprobs(-1)},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_step_of_wrong_values_fails_its_own_requests_and_no_others(wrong: str) -> None:
    sound: dict[str, Any] = {
        "tokens": columns(5, 6),
        "logprobs": logprobs(-1, -2),
        "version": 3,
        "counts": [1, 1],
    }
    broken = Step(keys=[A, B], **{**sound, **WRONG[wrong]})
    later = Step([C], [1], columns(7), logprobs(-3), 3, [(0, "stop")])
    found = await entries_of([broken, later])
    failed = [entry for entry in found if entry.kind == "failed"]
    assert [entry.rid for entry in failed] == ["c/1", "c/2"]
    for entry in failed:
        problem = unpack(entry)
        assert isinstance(problem, Problem)
        assert problem.code == "engine_failed"
    body = unpack(found[-1])
    assert isinstance(body, Deltas)
    assert list(zip(body.rids, body.counts, strict=True)) == [("c/1", 0), ("c/2", 0), ("c/3", 1)]
    assert np.frombuffer(body.tokens, np.int32).tolist() == [7]
    assert body.finishes == [(2, "stop")]


async def test_numbers_of_numpy_are_numbers() -> None:
    body = await said(
        [Step([A], [cast("int", np.int64(1))], columns(5), logprobs(-1), cast("int", np.uint64(4)))]
    )
    assert (body.counts, body.versions) == ([1], [4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"finishes": [(0, "bored"), (1, "stop")]},
        {"finishes": [(0, "stop"), (1, "stop")], "arrays": [(0, {"x": np.zeros(3)})]},
        {
            "finishes": [(0, "stop"), (1, "stop")],
            "arrays": [(0, {"x": Array(cast("Any", "float99"), (1,), b"....")})],
        },
    ],
)
async def test_wrong_value_of_one_row_fails_that_row(wrong: dict[str, Any]) -> None:
    found = await entries_of([Step([A, B], [1, 1], columns(5, 6), logprobs(-1, -2), 3, **wrong)])
    assert [(entry.kind, entry.rid) for entry in found] == [("failed", "c/1"), ("deltas", "")]
    body = unpack(found[-1])
    assert isinstance(body, Deltas)
    assert body.finishes == [(1, "stop")]
