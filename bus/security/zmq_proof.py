"""The proof that a lock works: the socket itself refuses a stranger's key and takes a known one.

It only shakes hands: nothing is said, and the actor behind the socket notices nothing.
"""

import asyncio

import zmq
import zmq.utils.monitor

from rolloutbus.bus.security.keys import KeyPair
from rolloutbus.bus.security.zmq_curve import dress_client, new_key_pair
from rolloutbus.bus.transport.zmq_sockets import Reader, allow_v6, new_socket
from rolloutbus.bus.wire.errors import SecurityError

HANDSHAKE_S = 20.0
"""A busy machine needs a fraction of it."""
TRIES = 3
"""A publisher that is just being opened again, or a process that was frozen, is not broken."""
PAUSE_S = 0.5

_ACCEPTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


async def prove(address: str, kind: int, server_key: str, known: KeyPair) -> None:
    """Knock twice at a guarded socket.

    Args:
        address: where it listens.
        kind: of the socket that knocks: DEALER at a ROUTER, SUB at a PUB.
        server_key: what it must prove to hold.
        known: a pair that must be let in.

    Raises:
        SecurityError: a random key came in, or the known one did not.
    """
    if await _is_let_in(address, kind, server_key, new_key_pair("stranger")):
        raise SecurityError(f"{address} let an unknown key in: it must not be used")
    for _ in range(TRIES):
        if await _is_let_in(address, kind, server_key, known):
            return
        await asyncio.sleep(PAUSE_S)
    raise SecurityError(f"{address} lets nobody in: the check of keys does not answer")


async def _is_let_in(address: str, kind: int, server_key: str, pair: KeyPair) -> bool:
    socket = new_socket(kind)
    dress_client(socket, pair, server_key)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = socket.get_monitor_socket(_ACCEPTED | _REFUSED)
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def read_some() -> bool:
        try:
            event = zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if not found.done():
            found.set_result(int(event["event"]) == _ACCEPTED)
        return True

    reader = Reader(monitor, read_some)
    try:
        allow_v6(socket, address)
        socket.connect(address)
        async with asyncio.timeout(HANDSHAKE_S):
            return await found
    except TimeoutError:
        return False
    finally:
        reader.close()
        socket.disable_monitor()
        monitor.close()
        socket.close()
