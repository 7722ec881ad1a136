"""The two processes under comparison: the router with all its features, and libzmq's C proxy."""

import asyncio
import threading
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
import zmq

from router.actor import RouterActor
from router.settings import RouterSettings


class Usage(NamedTuple):
    """What a middle process has used and carried so far."""

    cpu_s: float
    n_frames: int = 0
    n_entries: int = 0
    """In and out together; 0 where frames are not batches."""


def run_router(frontend: str, backend: str, pipe: Connection) -> None:
    """Serve until the pipe closes; says its endpoints first, then a `Usage` per request."""
    uvloop.run(_router(RouterSettings(frontend, backend), pipe))


async def _router(settings: RouterSettings, pipe: Connection) -> None:
    stop = asyncio.Event()
    async with RouterActor(settings, "benchmark") as router:
        pipe.send(router.endpoints)

        def answer() -> None:
            try:
                pipe.recv()
            except EOFError:
                stop.set()
                return
            seen = router.counters
            pipe.send(
                Usage(
                    time.process_time(),
                    seen.frames_in + seen.frames_out,
                    seen.entries_in + seen.entries_out,
                )
            )

        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), answer)
        await router.run_until(stop)
        loop.remove_reader(pipe.fileno())


def run_proxy(frontend: str, backend: str, pipe: Connection) -> None:
    """The same conversation around `zmq.proxy`, which does no work at all."""
    context = zmq.Context[zmq.Socket[bytes]]()
    sides = [context.socket(zmq.ROUTER), context.socket(zmq.DEALER)]
    for side, endpoint in zip(sides, [frontend, backend], strict=True):
        side.setsockopt(zmq.LINGER, 0)
        side.setsockopt(zmq.BACKLOG, 4_096)
        side.bind(endpoint)
    pipe.send([side.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for side in sides])  # type: ignore[union-attr] - bytes by libzmq's manual
    threading.Thread(target=zmq.proxy, args=sides, daemon=True).start()
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(Usage(time.process_time()))
