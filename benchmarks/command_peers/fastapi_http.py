"""HTTP: a FastAPI router that asks FastAPI workers by httpx, all served by uvicorn."""

# pyright: basic, reportMissingImports=false
# httpx and FastAPI are not installed where types are checked.

import socket
import sys
from itertools import cycle

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


def _http_client() -> httpx.AsyncClient:
    """Connections are kept, and as many as there are commands in flight."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, timeout=ANSWER_S, trust_env=False)


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


def _router(addresses: list[str]) -> None:
    app = FastAPI()
    turns = cycle(addresses)
    client = _http_client()

    @app.post("/command")
    async def forward(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        reply = await client.post(next(turns), content=await request.body())
        return Response(reply.content, reply.status_code)

    _serve(app)


async def _client(n_workers: int) -> None:
    async with (
        workers("fastapi_http", n_workers) as addresses,
        role("fastapi_http", "router", *addresses) as address,
        _http_client() as client,
    ):

        async def ask() -> None:
            check((await client.post(address, content=BODY)).content)

        await measure(ask)


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers]:
            uvloop.run(_client(int(n_workers)))
        case ["router", *addresses]:
            _router(addresses)
        case ["worker", _]:
            _worker()
        case wrong:
            sys.exit(f"no such role: {wrong}")
