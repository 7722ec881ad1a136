"""Repeated requests find their first try: middleware for `x-request-id`."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolloutbus.gateway.exchange import IS_CUT, as_json
from rolloutbus.gateway.headers import CHOOSING, header_in
from rolloutbus.gateway.problems import error_body

HEADER = "x-request-id"
PATHS = frozenset(
    {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
    }
)
"""Whatever samples."""
MAX_ID = 128
LEFT_S = 30.0
"""How long a request goes on whose callers have all left: they may try again."""
KEPT_S = 300.0
"""How long an answer is kept."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of all answers that are kept; the oldest go first."""


class _Peek(msgspec.Struct):
    """The one field of a body that matters here."""

    stream: Any = False


@dataclass(eq=False, slots=True)
class _Try:
    """The request as it was first asked."""

    digest: bytes
    scope: Scope
    messages: list[Message] = field(default_factory=list[Message])
    """The answer."""
    n_waiting: int = 0
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    work: "asyncio.Future[None]" = field(init=False)
    expiry: asyncio.TimerHandle | None = None
    abandoning: asyncio.TimerHandle | None = None
    """Set while nobody waits."""

    @property
    def n_bytes(self) -> int:
        return sum(len(message.get("body", b"")) for message in self.messages)

    @property
    def is_kept(self) -> bool:
        """Whether its answer will do for all who ask again: it is complete, and no error."""
        if not self.messages or self.messages[-1].get("more_body", False):
            return False
        is_cut = self.scope.get(IS_CUT, False)
        return self.messages[0].get("status") == HTTPStatus.OK and not is_cut


class OncePerRequestId:
    """Middleware: requests with one `x-request-id`, one body and like headers are sampled once.

    A repeated one waits for the first, or gets its answer, for some minutes. When all who wait have
    left, the first goes on for a while, so that it can be found again; then it is aborted. Errors
    and aborted answers are not kept, and streams are not shared: all of them are asked anew.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        """`max_body_bytes`: of a request; a larger one is passed on, to be refused."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._tries: dict[str, _Try] = {}
        """By request id, oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        is_sampling = scope["type"] == "http" and scope["path"] in PATHS
        request_id = header_in(scope, HEADER.encode()) if is_sampling else None
        if request_id is None:
            await self._app(scope, receive, send)
            return
        if not (0 < len(request_id) <= MAX_ID and request_id.isprintable()):
            message = f"an {HEADER} has 1 to {MAX_ID} printable characters"
            await _refuse(HTTPStatus.BAD_REQUEST, message, "bad_request")(scope, receive, send)
            return
        read = await _body(receive, self._max_body_bytes)
        if read.is_whole and not _is_stream(read.content):
            await self._once(request_id, read.content, scope, receive, send)
        else:
            await self._app(scope, read.again(receive), send)

    async def _once(
        self, request_id: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        chosen = [header_in(scope, name) for name in CHOOSING]
        digest = hashlib.sha256(repr([scope["path"], *chosen]).encode() + b"\n" + body).digest()
        found = self._tries.get(request_id)
        if found is None:
            found = self._begun(request_id, digest, body, scope)
        elif found.digest != digest:
            what = "body, path, session or version policy"
            message = f"a request with this {HEADER} had another {what}; take a new one"
            await _refuse(HTTPStatus.CONFLICT, message, "duplicate_rid")(scope, receive, send)
            return
        found.n_waiting += 1
        if found.abandoning is not None:
            found.abandoning.cancel()
        try:
            is_there = await _ended_before_left(found.work, receive)
        finally:
            found.n_waiting -= 1
            if not found.n_waiting and not found.work.done():
                loop = asyncio.get_running_loop()
                found.abandoning = loop.call_later(LEFT_S, self._abandon, found)
        if is_there:
            scope.setdefault("route", found.scope.get("route"))
            for message in found.messages:
                await send(message)

    def _begun(self, request_id: str, digest: bytes, body: bytes, scope: Scope) -> _Try:
        made = self._tries[request_id] = _Try(digest, scope)
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if given:
                return given.pop()
            await made.abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            made.messages.append(message)

        async def answer() -> None:
            await self._app(scope, receive, send)

        made.work = asyncio.ensure_future(answer())
        made.work.add_done_callback(lambda _: self._settle(request_id, made))
        return made

    def _settle(self, request_id: str, ended: _Try) -> None:
        """Keep its answer for a while, or forget it."""
        if ended.work.cancelled() or ended.work.exception() is not None or not ended.is_kept:
            self._forget(request_id, ended)
            return
        loop = asyncio.get_running_loop()
        ended.expiry = loop.call_later(KEPT_S, self._forget, request_id, ended)
        kept = [(name, each) for name, each in self._tries.items() if each.work.done()]
        n_bytes = sum(each.n_bytes for _, each in kept)
        for name, each in kept:
            if n_bytes <= MAX_KEPT_BYTES:
                break
            n_bytes -= each.n_bytes
            self._forget(name, each)

    def _forget(self, request_id: str, ended: _Try) -> None:
        if self._tries.get(request_id) is ended:
            del self._tries[request_id]
        if ended.expiry is not None:
            ended.expiry.cancel()

    def _abandon(self, left: _Try) -> None:
        """Give up a request that no client has come back for."""
        if not left.n_waiting:
            left.abandoned.set()


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of a body."""

    content: bytes
    is_whole: bool
    is_gone: bool

    def again(self, receive: Receive) -> Receive:
        """Gives the same again, then the rest."""
        first: list[Message] = [
            {"type": "http.request", "body": self.content, "more_body": not self.is_whole}
        ]
        if self.is_gone:
            first = [{"type": "http.disconnect"}]

        async def both() -> Message:
            return first.pop() if first else await receive()

        return both


async def _body(receive: Receive, limit: int) -> _Read:
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return _Read(bytes(content), is_whole=False, is_gone=True)
        content += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        if is_whole or len(content) > limit:
            return _Read(bytes(content), is_whole=is_whole, is_gone=False)


def _is_stream(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Peek).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # it is refused by whatever answers


async def _ended_before_left(work: "asyncio.Future[None]", receive: Receive) -> bool:
    """Waits for `work`; false once its caller has disconnected. Raises what `work` does."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not work.done():
        return False
    work.result()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse(status: HTTPStatus, message: str, code: str) -> Callable[..., Any]:
    return as_json(error_body(status, message, param=HEADER, code=code), status)
