"""Several streams as one: nothing is lost, and all of them are closed."""

from collections.abc import AsyncGenerator

import pytest

from rolloutbus.trainer_adapter.openai.client import merged


async def numbers(n: int, log: list[int], *, fails: bool = False) -> AsyncGenerator[int]:
    try:
        for i in range(n):
            yield i
        if fails:
            raise ValueError("it broke")
    finally:
        log.append(n)


async def test_every_item_of_every_stream_comes_in_its_order() -> None:
    log: list[int] = []
    found = [each async for each in merged([numbers(3, log), numbers(0, log), numbers(2, log)])]
    assert [item for index, item in found if index == 0] == [0, 1, 2]
    assert [item for index, item in found if index == 2] == [0, 1]
    assert len(found) == 5
    assert sorted(log) == [0, 2, 3]


async def test_a_stream_that_fails_closes_the_others() -> None:
    log: list[int] = []
    with pytest.raises(ValueError, match="broke"):
        async for _ in merged([numbers(1000, log), numbers(1, log, fails=True)]):
            pass
    assert sorted(log) == [1, 1000]


async def test_leaving_early_closes_all() -> None:
    log: list[int] = []
    stream = merged([numbers(1000, log), numbers(2000, log)])
    await anext(stream)
    await stream.aclose()
    assert sorted(log) == [1000, 2000]
