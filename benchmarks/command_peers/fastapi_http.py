"""HTTP: a FastAPI router in front of FastAPI workers, all served by uvicorn.

Client and router ask by httpx, which is what FastAPI's own pages show, or by aiohttp, which takes
many commands in flight far better.
"""

# pyright: basic, reportMissingImports=false
# What this imports is not installed where types are checked.

import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import cycle

import aiohttp
import httpx
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

from benchmarks.command_peers.closed_loop import (
    ANSWER_S,
    BODY,
    check,
    measure,
    role,
    say_ready,
    workers,
)
from rolloutbus.bus.actor.process import die_with_parent

BACKLOG = 4_096
KEEP_ALIVE_S = 300
"""Longer than a client keeps an idle connection: else one is closed just when it is used."""


Post = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a body to an address, and returns that of the response."""


@asynccontextmanager
async def _by_httpx() -> AsyncGenerator[Post]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=ANSWER_S, trust_env=False) as client:

        async def post(address: str, body: bytes) -> bytes:
            response = await client.post(address, content=body)
            return response.raise_for_status().content

        yield post


@asynccontextmanager
async def _by_aiohttp() -> AsyncGenerator[Post]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as session:

        async def post(address: str, body: bytes) -> bytes:
            async with session.post(address, data=body) as response:
                return await response.read()

        yield post


CLIENTS = {"httpx": _by_httpx, "aiohttp": _by_aiohttp}
"""Both keep connections, as many as there are commands in flight."""


def _serve(app: FastAPI) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    say_ready(f"http://127.0.0.1:{listener.getsockname()[1]}/command")
    config = uvicorn.Config(
        app, log_level="error", access_log=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S
    )
    uvicorn.Server(config).run(sockets=[listener])


def _worker() -> None:
    app = FastAPI()

    @app.post("/command")
    async def answer(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(await request.body())

    _serve(app)


def _router(library: str, addresses: list[str]) -> None:
    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncGenerator[None]:
        async with CLIENTS[library]() as app.state.post:
            yield

    app = FastAPI(lifespan=connected)
    turns = cycle(addresses)

    @app.post("/command")
    async def forward(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(await app.state.post(next(turns), await request.body()))

    _serve(app)


async def _client(n_workers: int, library: str) -> None:
    async with (
        workers("fastapi_http", n_workers) as addresses,
        role("fastapi_http", "router", library, *addresses) as address,
        CLIENTS[library]() as post,
    ):

        async def ask() -> None:
            check(await post(address, BODY))

        await measure(ask)


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers, library]:
            uvloop.run(_client(int(n_workers), library))
        case ["router", library, *addresses]:
            _router(library, addresses)
        case ["worker", _]:
            _worker()
        case wrong:
            sys.exit(f"no such role: {wrong}")
