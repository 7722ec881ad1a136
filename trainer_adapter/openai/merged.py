"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of its stream, item) of each, as they come; leaving early closes all streams.

    Raises:
        Exception: what a stream raised; the others are closed.
    """
    waiting = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                item = task.result()
                index = waiting.pop(task)
                if item is not None:
                    yield index, item
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T]) -> T | None:
    return await anext(stream, None)
