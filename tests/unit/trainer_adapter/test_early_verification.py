"""When the store is told of tensors that are written, so that it verifies them meanwhile."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.trainer_adapter.publisher import early_verification
from rolloutbus.trainer_adapter.publisher.early_verification import (
    PART_BYTES,
    PARTS,
    EarlyVerification,
)

HALF = (PART_BYTES // 2 // 4,)
"""Shape of half of what is told of at once, in float32."""


class Told:
    """What the store has heard of; with `error` it answers with that."""

    def __init__(self, error: Exception | None = None) -> None:
        self.parts: list[list[tuple[int, int]]] = []
        self.is_reminded = asyncio.Event()
        self._error = error

    async def __call__(self, numbers: list[int], digests: list[int]) -> None:
        if not numbers:
            self.is_reminded.set()
            return
        self.parts.append([*zip(numbers, digests, strict=True)])
        if self._error is not None:
            raise self._error


async def write(n_tensors: int, told: Told) -> EarlyVerification:
    """So many halves are written, by a thread; the digest of each is ten times its place."""
    layout = lay_out((f"t{number}", "F32", HALF) for number in range(n_tensors))
    early = EarlyVerification(layout, told)

    def write_all() -> None:
        for number, tensor in enumerate(layout):
            early.written(tensor, 10 * number)

    with ThreadPoolExecutor(1) as threads:
        await asyncio.get_running_loop().run_in_executor(threads, write_all)
    await asyncio.sleep(0)  # what it has asked for begins
    return early


async def test_the_store_is_told_of_parts_and_not_of_the_rest() -> None:
    told = Told()
    await write(5, told)
    assert told.parts == [[(0, 0), (1, 10)], [(2, 20), (3, 30)]]


async def test_a_large_version_is_told_of_in_few_parts() -> None:
    told = Told()
    await write(8 * PARTS, told)
    assert [len(part) for part in told.parts] == [8] * PARTS


async def test_a_small_version_is_left_to_the_seal() -> None:
    told = Told()
    await write(1, told)
    assert not told.parts


async def test_the_store_is_reminded_of_a_version_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early_verification, "REMIND_S", 0.001)
    told = Told()
    early = await write(0, told)
    async with asyncio.timeout(30.0):
        for _ in range(2):
            await told.is_reminded.wait()
            told.is_reminded.clear()
    early.close()


async def test_a_store_that_does_not_answer_well_changes_nothing() -> None:
    told = Told(PeerLost("gone", outcome="unknown"))
    early = await write(4, told)
    assert len(told.parts) == 2
    early.close()


async def test_nobody_waits_for_answers_once_it_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = asyncio.all_tasks()
    began = asyncio.Event()

    class Silent(Told):
        async def __call__(self, numbers: list[int], digests: list[int]) -> None:
            await super().__call__(numbers, digests)
            began.set()
            await asyncio.Event().wait()

    early = await write(2, Silent())
    await asyncio.wait_for(began.wait(), 10.0)
    early.close()
    await asyncio.wait(asyncio.all_tasks() - before, timeout=10.0)
    assert asyncio.all_tasks() == before
    assert not caplog.records


async def test_the_store_is_not_told_after_it_is_closed() -> None:
    told = Told()
    layout = lay_out([("t0", "F32", HALF), ("t1", "F32", HALF)])
    early = EarlyVerification(layout, told)
    for tensor in layout:
        early.written(tensor, 0)
    early.close()  # the loop has not come to tell of it
    await asyncio.sleep(0)
    assert not told.parts
