"""One HTTP exchange: its route, a bounded body, and an answer given up when its reader leaves."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Self, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from rolloutbus.bus.wire.errors import ActorStopped, BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.near_names import nearest

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
Json = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]

DONE = b"data: [DONE]\n\n"
IS_CUT = "rolloutbus.is_cut"
"""In the scope of a request: whether its answer was aborted, so that who asks again wants more."""
_PLACE = re.compile(r"`\$\.?(?P<path>[^`]*)`")


class DirectRoute(Route):
    """A fixed path of an endpoint that reads its request itself.

    What FastAPI does for an endpoint's arguments costs more than a short answer of ours does, and
    endpoints that sample have no such arguments.
    """

    def __init__(self, path: str, endpoint: Endpoint, *methods: str) -> None:
        """`path` has no parameters."""
        super().__init__(path, endpoint, methods=methods)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route` does; `scope["route"]` is set too, which FastAPI does for its own only."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found


class BodyTooLarge(Exception):
    """The body of a request is larger than this gateway takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes")


class ClientLeft(Exception):
    """The HTTP client disconnected before it was answered."""


async def body_of(request: Request, limit: int) -> Json:
    """Read the JSON object that a request carries; an empty body is an empty object.

    Raises:
        Refused: it is no JSON, or no object.
        BodyTooLarge: it has more than `limit` bytes.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise BodyTooLarge(limit)
    if not body:
        return {}
    try:
        return msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(bad_request("body", f"the body is no JSON object: {error}")) from error


def converted(fields: Json, kind: type[StructT], within: str = "") -> StructT:
    """A body, or a part of one, as a struct.

    Args:
        fields: as JSON has them.
        kind: what it is to be.
        within: name of the part, where it is no whole body.

    Raises:
        Refused: a field is unknown or has a wrong type; `.field` names it.
    """
    prefix = f"{within}." if within else ""
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else "leave it out"
            message = f"there is no field {name[:64]!r} here; {hint}"
            field = f"{prefix}{name[:64]}"
            raise Refused(Problem("unsupported", message, "not_started", field=field))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at ")
        path = _PLACE.search(place)
        field = f"{prefix}{path['path'] if path else ''}".rstrip(".")
        told = f"{field}: {sentence}" if field else sentence
        raise Refused(bad_request(field or "body", told)) from error


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns what `work` does; cancels it when the HTTP client disconnects.

    Raises:
        ClientLeft: it disconnected.
    """
    with _GivenUp(request.receive):
        return await work


class _GivenUp:
    """Cancels what is within when the HTTP client disconnects: ClientLeft then.

    One task watches the client, and what is within runs in its caller's: tasks are what a short
    exchange costs most.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_within = True
        self._has_left = False

    def __enter__(self) -> None:
        """Begin to watch."""
        working = asyncio.current_task()
        assert working is not None, "a server runs each request in a task"
        self._working = working
        self._watching = asyncio.ensure_future(_disconnected(self._receive))
        self._watching.add_done_callback(self._left)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Watch no more."""
        self._is_within = False
        self._watching.cancel()
        is_cancelled = kind is asyncio.CancelledError
        if is_cancelled and self._has_left and not self._working.uncancel():
            raise ClientLeft from None

    def _left(self, watching: asyncio.Task[None]) -> None:
        if self._is_within and not watching.cancelled():
            self._has_left = True
            self._working.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def as_json(
    content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


class EventStream(Response):
    """Server-sent events; leaves the source early when the HTTP client disconnects.

    A source that fails ends the stream with an error event and without `[DONE]`; so does a server
    that ends first. Make one with `EventStream.of`: what fails before the first event has a status
    of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: Json, rest: AsyncGenerator[Json], describe: Callable[[BusError], Json]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._describe = describe

    @classmethod
    async def of(
        cls,
        request: Request,
        events: AsyncGenerator[Json],
        describe: Callable[[BusError], Json],
    ) -> Self:
        """A response that begins once the first event is there.

        Args:
            request: nobody waits for the first event when its client has left.
            events: each becomes one `data:` line of JSON; there is at least one.
            describe: the object that tells an error.
        """
        try:
            first = await while_connected(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events, describe)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; see the class."""
        del scope
        with suppress(ClientLeft), _GivenUp(receive):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._rest) as rest, _begun(send, self) as write:
            try:
                await write(_line(self._first))
                async for event in rest:
                    await write(_line(event))
            except BusError as error:
                await write(_line(self._describe(error)))
                return
            except asyncio.CancelledError:  # by the server; or its reader left and takes nothing
                ended = ActorStopped("the gateway ended", outcome="unknown")
                run_at_once(_end(send, _line(self._describe(ended))))
                raise
            await write(DONE)


def _line(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


@asynccontextmanager
async def _begun(
    send: Send, response: Response
) -> AsyncGenerator[Callable[[bytes], Awaitable[None]]]:
    start = {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": response.raw_headers,
    }
    await send(start)

    async def write(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    yield write
    await _end(send, b"")


async def _end(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": False})


def run_at_once(work: Awaitable[None]) -> None:
    """Run a coroutine, or as much of it as need not wait.

    A reader who takes nothing keeps whoever sends waiting, and at the end nobody would cancel that.
    """
    steps = work.__await__()
    with suppress(StopIteration):
        next(steps)
        steps.close()
