"""A request that is asked again: for how long it goes on when nobody waits for it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from rolloutbus.gateway import repeats
from rolloutbus.gateway.repeats import PATHS, OncePerRequestId

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
BODY = json.dumps({"model": "default"}).encode()
SCOPE: Message = {"type": "http", "path": min(PATHS), "headers": [(b"x-request-id", b"r1")]}


class Sampling:
    """An application that samples until its caller leaves."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.is_abandoned = asyncio.Event()

    async def __call__(self, _scope: Message, receive: Receive, _send: object) -> None:
        self.n_asked += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_abandoned.set()


async def ask_and_leave(app: OncePerRequestId) -> None:
    given: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Message:
        await asyncio.sleep(0)
        return given.pop() if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await app(dict(SCOPE), receive, send)


async def test_who_comes_back_and_leaves_has_all_of_the_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = Sampling()
    app = OncePerRequestId(sampling, 1 << 20)
    monkeypatch.setattr(repeats, "LEFT_S", 0.05)
    await ask_and_leave(app)
    monkeypatch.setattr(repeats, "LEFT_S", 60.0)
    await ask_and_leave(app)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sampling.is_abandoned.wait(), 0.2)
    monkeypatch.setattr(repeats, "LEFT_S", 0.0)
    await ask_and_leave(app)
    await asyncio.wait_for(sampling.is_abandoned.wait(), 30.0)
    assert sampling.n_asked == 1
