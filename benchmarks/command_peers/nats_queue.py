"""NATS: request and reply by way of `nats-server`, to workers that share one queue group."""

# pyright: basic, reportMissingImports=false
# nats-py is not installed where types are checked.

import asyncio
import os
import socket
import sys

import nats
import uvloop

from benchmarks.command_peers.closed_loop import (
    ANSWER_S,
    BODY,
    check,
    measure,
    say_ready,
    workers,
)
from benchmarks.side_processes import process
from rolloutbus.bus.actor.process import die_with_parent

SUBJECT = "command"
CONNECT_S = 30
PAUSE_S = 0.1


def _server(program: str, port: str) -> None:
    """Become the server; the kernel ends it with its parent, as it did with this process."""
    os.execv(program, [program, "--addr", "127.0.0.1", "--port", port])  # noqa: S606 - no shell


async def _worker(url: str) -> None:
    connection = await _connected(url)

    async def answer(message) -> None:  # noqa: ANN001 - nats.aio.msg.Msg
        await message.respond(message.data)

    await connection.subscribe(SUBJECT, queue="workers", cb=answer)
    await connection.flush()
    say_ready()
    await asyncio.Event().wait()


async def _connected(url: str):  # noqa: ANN202 - nats.aio.client.Client
    """Once the server listens."""
    async with asyncio.timeout(CONNECT_S):
        while True:
            try:
                return await nats.connect(url, allow_reconnect=False, error_cb=_ignored)
            except (OSError, nats.errors.NoServersError):
                await asyncio.sleep(PAUSE_S)


async def _ignored(_error: Exception) -> None:
    """A refused connection is tried again."""


async def _client(n_workers: int, program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
    url = f"nats://127.0.0.1:{port}"
    async with (
        process("-m", "benchmarks.command_peers.nats_queue", "server", program, port),
        workers("nats_queue", n_workers, url),
    ):
        connection = await _connected(url)

        async def ask() -> None:
            check((await connection.request(SUBJECT, BODY, timeout=ANSWER_S)).data)

        await measure(ask)


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers, program]:
            uvloop.run(_client(int(n_workers), program))
        case ["server", program, port]:
            _server(program, port)
        case ["worker", url, _]:
            uvloop.run(_worker(url))
        case wrong:
            sys.exit(f"no such role: {wrong}")
