"""gRPC with asyncio: unary calls to a router, which makes the same call to the next worker.

Bodies are plain bytes: no protobuf is encoded or decoded anywhere.
"""

# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# grpcio is not installed where types are checked.

import sys
from collections.abc import Awaitable, Callable
from itertools import cycle

import grpc
import grpc.aio
import uvloop

from benchmarks.command_peers.closed_loop import BODY, check, measure, role, say_ready, workers
from rolloutbus.bus.actor.process import die_with_parent

METHOD = "/command/answer"
HOST = "127.0.0.1"
MAX_PENDING = 100_000
OPTIONS = [
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
]
"""A server cancels calls at random when 1,000 of them wait for it, unless it is told not to."""


class Service(grpc.GenericRpcHandler):
    """One method, on bytes."""

    def __init__(self, answer: Callable[[bytes, object], Awaitable[bytes]]) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, handler_call_details):  # noqa: ANN001, ANN201 - gRPC's
        """The handler of a call."""
        return self._handler if handler_call_details.method == METHOD else None


async def _serve(answer: Callable[[bytes, object], Awaitable[bytes]]) -> None:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers([Service(answer)])
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    say_ready(f"{HOST}:{port}")
    await server.wait_for_termination()


async def _worker() -> None:
    async def answer(body: bytes, _context: object) -> bytes:
        return body

    await _serve(answer)


async def _router(addresses: list[str]) -> None:
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    turns = cycle([channel.unary_unary(METHOD) for channel in channels])

    async def answer(body: bytes, _context: object) -> bytes:
        return await next(turns)(body)

    await _serve(answer)


async def _client(n_workers: int) -> None:
    async with (
        workers("grpc_aio", n_workers) as addresses,
        role("grpc_aio", "router", *addresses) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = channel.unary_unary(METHOD)

        async def ask() -> None:
            check(await call(BODY))

        await measure(ask)


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers]:
            uvloop.run(_client(int(n_workers)))
        case ["router", *addresses]:
            uvloop.run(_router(addresses))
        case ["worker", _]:
            uvloop.run(_worker())
        case wrong:
            sys.exit(f"no such role: {wrong}")
