"""What the processes of all paths have in common: bodies, children, and the closed loop.

Each path is a module that is run as `python -m benchmarks.command_peers.PATH ROLE`. The `client`
starts the path's router and workers, and then measures when it is told to: a JSON line in, a JSON
line out. Whoever starts something waits for its line `{"ready": …}`.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from benchmarks.side_processes import process, said

BODY = bytes(range(200))
"""Of each command, and of each reply."""
ANSWER_S = 20.0
"""How long a sample waits for its last replies."""

Ask = Callable[[], Awaitable[None]]
"""Sends one command, and returns when its reply is there. Raises if that is not what it must be."""


def say_ready(where: object = None) -> None:
    """Tell the process that started this one; `where`: what it needs for connecting."""
    print(json.dumps({"ready": where}), flush=True)


def check(reply: bytes) -> None:
    """Raises if a reply is not the one that was sent."""
    if reply != BODY:
        raise ValueError(f"a reply of {len(reply)} bytes, and not the {len(BODY)} that were sent")


@asynccontextmanager
async def role(module: str, *arguments: str) -> AsyncGenerator[Any]:
    """Another process of this path; what it says when it is ready. It ends with the block."""
    async with process("-m", f"benchmarks.command_peers.{module}", *arguments) as child:
        yield (await said(child))["ready"]


@asynccontextmanager
async def workers(module: str, n: int, *arguments: str) -> AsyncGenerator[list[Any]]:
    """So many worker processes, started at once; what each says when it is ready."""
    async with AsyncExitStack() as stack:
        command = ["-m", f"benchmarks.command_peers.{module}", "worker", *arguments]
        children = [
            await stack.enter_async_context(process(*command, str(number))) for number in range(n)
        ]
        yield [(await said(child))["ready"] for child in children]


async def measure(ask: Ask) -> None:
    """Take the samples that the input asks for, until it ends."""
    say_ready()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            found = await _sample(ask, asked["in_flight"], asked["seconds"])
        except* Exception as errors:  # noqa: BLE001 - whatever a path raises is what it does
            found = {"failed": _sentence(errors)}
        print(json.dumps(found), flush=True)


def _sentence(error: BaseException) -> str:
    """Of a group the first one; the others mostly say the same."""
    match error:
        case BaseExceptionGroup(exceptions=[BaseException() as first, *_]):
            return _sentence(first)
        case TimeoutError():
            return f"some command got no reply in {ANSWER_S:g} s"
        case _:
            return f"{type(error).__name__}: {error}".splitlines()[0]


async def _sample(ask: Ask, in_flight: int, seconds: float) -> dict[str, Any]:
    """A closed loop: each command that is answered is followed by the next one."""
    latencies_s: list[float] = []
    begun_at = time.perf_counter()
    until = begun_at + seconds

    async def lane() -> None:
        is_on = True
        while is_on:  # each sends at least one, else there would be fewer in flight
            at = time.perf_counter()
            await ask()
            now = time.perf_counter()
            latencies_s.append(now - at)
            is_on = now < until

    async with asyncio.timeout(seconds + ANSWER_S), asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(lane())
    elapsed_s = time.perf_counter() - begun_at
    latencies_s.sort()
    n_last = len(latencies_s) - 1
    return {
        "n": n_last + 1,
        "per_s": len(latencies_s) / elapsed_s,
        "p50_ms": latencies_s[n_last // 2] * 1000,
        "p99_ms": latencies_s[n_last * 99 // 100] * 1000,
    }
