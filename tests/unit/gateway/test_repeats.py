"""A request that is asked again: what makes it the same, and how long it goes on by itself."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from rolloutbus.gateway import repeats
from rolloutbus.gateway.repeats import PATHS, OncePerRequestId

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
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


class Naming:
    """An application that answers at once, with the number of the request."""

    def __init__(self) -> None:
        self.n_asked = 0

    async def __call__(self, _scope: Message, _receive: Receive, send: Send) -> None:
        self.n_asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(self.n_asked).encode()})


async def answer(app: OncePerRequestId, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """Status and body of what a request with these headers gets."""
    given: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not given:
            await asyncio.Event().wait()  # its caller stays
        return given.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(30.0):
        await app({**SCOPE, "headers": [*SCOPE["headers"], *headers]}, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize(
    "header",
    [
        (b"x-session-id", b"s2"),
        (b"x-smg-routing-key", b"s2"),
        (b"x-smg-version-policy", b"latest-only"),
    ],
)
async def test_a_header_that_chooses_who_samples_makes_it_another_request(
    header: tuple[bytes, bytes],
) -> None:
    app = OncePerRequestId(Naming(), 1 << 20)
    assert await answer(app, (b"x-session-id", b"s1")) == (200, b"1")
    status, refusal = await answer(app, header)
    assert (status, json.loads(refusal)["error"]["code"]) == (409, "duplicate_rid")
    assert await answer(app, (b"x-session-id", b"s1")) == (200, b"1")


async def test_who_asks_again_may_have_less_time_left() -> None:
    app = OncePerRequestId(Naming(), 1 << 20)
    assert await answer(app, (b"x-deadline-ms", b"9000")) == (200, b"1")
    assert await answer(app, (b"x-deadline-ms", b"3000")) == (200, b"1")
