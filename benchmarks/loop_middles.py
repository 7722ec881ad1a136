"""The two processes that are compared: the router with all features, and libzmq's C proxy.

Each prints its endpoints as JSON, then its usage so far for every line it reads; it leaves at the
end of its input.
"""

import asyncio
import json
import sys
import threading
import time

import msgspec
import uvloop
import zmq

from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings


class Usage(msgspec.Struct, frozen=True):
    """What a middle process has used and carried so far."""

    cpu_s: float
    """Of all threads."""
    loop_s: float = 0.0
    """CPU of the thread that decides; 0 where that is not the main one."""
    n_frames: int = 0
    n_entries: int = 0
    """In and out together; 0 where frames are not batches."""


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def run_router(frontend: str, backend: str) -> None:
    """Serve until the input ends."""
    async with RouterActor(RouterSettings(frontend, backend), "benchmark") as router:

        def answer() -> None:
            if not sys.stdin.readline():
                router.stop()
                return
            seen = router.counters
            n_frames = seen.frames_in + seen.frames_out
            n_entries = seen.entries_in + seen.entries_out
            usage = Usage(time.process_time(), time.thread_time(), n_frames, n_entries)
            _say(msgspec.to_builtins(usage))

        _say(router.endpoints)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), answer)
        await router.stopped()


def run_proxy(frontend: str, backend: str) -> None:
    """The same around `zmq.proxy`, which does no work at all."""
    context = zmq.Context[zmq.Socket[bytes]]()
    sides = [context.socket(zmq.ROUTER), context.socket(zmq.DEALER)]
    for side, endpoint in zip(sides, [frontend, backend], strict=True):
        side.setsockopt(zmq.LINGER, 0)
        side.setsockopt(zmq.BACKLOG, 4_096)
        side.bind(endpoint)
    _say([side.get_string(zmq.LAST_ENDPOINT) for side in sides])
    threading.Thread(target=zmq.proxy, args=sides, daemon=True).start()
    for _ in sys.stdin:
        _say(msgspec.to_builtins(Usage(time.process_time())))


def main() -> None:
    """Run the side named first between the two endpoints named next."""
    name, frontend, backend = sys.argv[1:]
    if name == "router":
        uvloop.run(run_router(frontend, backend))
    else:
        run_proxy(frontend, backend)


if __name__ == "__main__":
    main()
