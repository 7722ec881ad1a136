"""A process that hangs while its socket is full outlives whoever filled it.

libzmq aborts such a process if a ping of its own is due on the broken connection.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
import zmq

from rolloutbus.bus.transport.zmq_sockets import bind_local, new_socket
from tests.integration.live_fleet import DEADLINE_S
from tests.line_process import line_processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KINDS = {"SUB": (zmq.XPUB, zmq.XPUB_NODROP), "DEALER": (zmq.ROUTER, zmq.ROUTER_MANDATORY)}
"""Who reads -> who writes, and how that one is told that a reader has no room."""
HELD_MESSAGES = 1_000
"""Those that have room at each end of a connection."""
MESSAGE_BYTES = 1 << 14
"""So many that libzmq's thread has no more than one or two messages in its hands."""
LOST_MESSAGES = 10
PINGS_DUE_S = 2.0
"""By then a socket with the pings that are usual would have sent one."""


@contextmanager
def writer(reads: str, endpoint: str) -> Generator[zmq.Socket[bytes]]:
    kind, tells = KINDS[reads]
    with new_socket(kind) as socket:
        socket.setsockopt(tells, 1)
        bind_local(socket, endpoint)
        yield socket


def fill(socket: zmq.Socket[bytes]) -> None:
    """Write to the one who is there until neither end has room.

    The writer's end may be full before its thread has sent anything: what is there is lost with it,
    and so is what its thread has in its hands.
    """
    assert socket.poll(int(1000 * DEADLINE_S))
    *to, _ = socket.recv_multipart()
    until = monotonic() + DEADLINE_S
    n_sent = 0
    while monotonic() < until:
        try:
            message = str(n_sent).ljust(MESSAGE_BYTES).encode()
            socket.send_multipart([*to, message], zmq.NOBLOCK)
        except zmq.Again:
            if n_sent >= 2 * HELD_MESSAGES:
                return
        else:
            n_sent += 1
    raise AssertionError(f"the reader took no more than {n_sent} messages")


@pytest.mark.parametrize("reads", KINDS)
async def test_a_process_that_reads_nothing_outlives_who_filled_its_socket(
    tmp_path: Path, reads: str
) -> None:
    endpoint = f"ipc://{tmp_path}/p"
    with writer(reads, endpoint) as socket:
        async with line_processes([("tests.integration.slow_reader", reads, endpoint)]) as (hung,):
            fill(socket)
            socket.close()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(PINGS_DUE_S):
                    await hung.ended()
            for n in range(HELD_MESSAGES - LOST_MESSAGES):
                assert await hung.ask("read") == {"message": str(n)}
