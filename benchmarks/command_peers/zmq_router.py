"""A router as one writes it with `zmq.asyncio`: ROUTER in front, DEALER behind, multipart messages.

Messages are [client, number, body]. libzmq gives each to the next worker, in turn. No limits on
queues, as messages would be dropped, no heartbeats, and nothing is sent again.
"""

# pyright: strict, reportUnknownMemberType=false
# Messages of zmq.asyncio are only partly typed.

import asyncio
import sys
from contextlib import AsyncExitStack
from itertools import count

import uvloop
import zmq
import zmq.asyncio

from benchmarks.command_peers.closed_loop import BODY, check, measure, role, say_ready, workers
from rolloutbus.bus.actor.process import die_with_parent


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


async def _forward(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket) -> None:
    while True:
        await target.send_multipart(await source.recv_multipart())


async def _router() -> None:
    front, back = _socket(zmq.ROUTER), _socket(zmq.DEALER)
    for socket in (front, back):
        socket.bind("tcp://127.0.0.1:0")
    say_ready([socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (front, back)])
    async with asyncio.TaskGroup() as group:
        group.create_task(_forward(front, back))
        group.create_task(_forward(back, front))


async def _worker(endpoint: str) -> None:
    socket = _socket(zmq.DEALER)
    socket.connect(endpoint)
    say_ready()
    while True:
        client, number, body = await socket.recv_multipart()
        await socket.send_multipart([client, number, body])


async def _client(n_workers: int) -> None:
    async with AsyncExitStack() as stack:
        frontend, backend = await stack.enter_async_context(role("zmq_router", "router"))
        await stack.enter_async_context(workers("zmq_router", n_workers, backend))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        socket = _socket(zmq.DEALER)
        socket.connect(frontend)
        futures: dict[bytes, asyncio.Future[bytes]] = {}
        loop = asyncio.get_running_loop()
        numbers = count()

        async def receive() -> None:
            while True:
                number, body = await socket.recv_multipart()
                future = futures.pop(number)
                if not future.done():  # its caller has not left
                    future.set_result(body)

        async def ask() -> None:
            number = str(next(numbers)).encode()
            future = futures[number] = loop.create_future()
            await socket.send_multipart([number, BODY])
            check(await future)

        receiving = group.create_task(receive())
        await measure(ask)
        receiving.cancel()


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers]:
            uvloop.run(_client(int(n_workers)))
        case ["router"]:
            uvloop.run(_router())
        case ["worker", endpoint, _]:
            uvloop.run(_worker(endpoint))
        case wrong:
            sys.exit(f"no such role: {wrong}")
