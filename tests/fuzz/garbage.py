"""Connections to a ZeroMQ port by peers that do not speak it, or stop speaking it half way."""

import asyncio
import contextlib
import random
import socket
import struct

from rolloutbus.bus.wire.codec import SIGNATURE
from tests.conformance.make_vectors import frame_of
from tests.conformance.representatives import NAMES
from tests.fuzz.mutations import changed_bytes

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""ZMTP 3.0: signature and version; 20 bytes of mechanism, one of role and 31 of padding follow."""
FRAMES = [frame_of(entry) for entry in NAMES.values()]
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close with a reset, which leaves no port waiting; thousands come after it."""
HANG_UP_S = 0.02


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """A whole greeting."""
    return GREETING + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def ready(socket_type: bytes, identity: bytes) -> bytes:
    """The command that ends a handshake without keys."""
    properties = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", socket_type), (b"Identity", identity))
    )
    body = b"\x05READY" + properties
    return b"\x04" + bytes([len(body)]) + body


def frame(content: bytes, *, more: bool = False) -> bytes:
    """A ZMTP frame."""
    if len(content) > 255:
        return bytes([2 | more]) + len(content).to_bytes(8, "big") + content
    return bytes([more, len(content)]) + content


def nonsense(rng: random.Random) -> bytes:
    """What one connection sends. Nothing of it is a message that a peer could have meant."""
    shaken = greeting() + ready(rng.choice((b"DEALER", b"SUB", b"XSUB", b"REQ")), rng.randbytes(5))
    match rng.randrange(12):
        case 0:
            return rng.randbytes(rng.randrange(1, 200))
        case 1:
            return b"GET / HTTP/1.1\r\nHost: router\r\n\r\n" + b"x" * rng.randrange(4000)
        case 2:
            return GREETING[: rng.randrange(1, len(GREETING) + 1)]
        case 3:
            return greeting(rng.choice((b"CURVE", b"PLAIN", b"GSSAPI", b"x" * 20)))
        case 4:
            return greeting() + rng.randbytes(rng.randrange(1, 300))
        case 5:  # older than our protocol: a length, a flag, a name
            return b"\x01\x00" + b"".join(
                bytes([rng.randrange(1, 9), 0]) + rng.randbytes(8) for _ in range(20)
            )
        case 6:
            return greeting() + b"\x04\xff\x05READY" + rng.randbytes(40)
        case 7:
            return shaken + rng.randbytes(rng.randrange(1, 400))
        case 8:  # a frame of exabytes
            return shaken + b"\x02" + rng.choice((b"\x7f", b"\xff", b"\x00")) + b"\xff" * 7 + b"abc"
        case 9:
            return shaken + b"".join(frame(rng.randbytes(5), more=True) for _ in range(50))
        case 10:
            content = changed_bytes(rng.choice(FRAMES), rng)[len(SIGNATURE) :]
            return shaken + frame(b"rb" + content)
        case _:  # subscriptions
            return shaken + b"".join(frame(b"\x01" + rng.randbytes(300)) for _ in range(8))


async def connect_and_say(host: str, port: int, said: bytes) -> bool:
    """One connection; False if it could not even be made."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as peer:
        peer.setblocking(False)  # noqa: FBT003 - the name of this call
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        try:
            await loop.sock_connect(peer, (host, port))
        except OSError:
            return False
        with contextlib.suppress(OSError, TimeoutError):
            await loop.sock_sendall(peer, said)
            async with asyncio.timeout(HANG_UP_S):
                while await loop.sock_recv(peer, 4096):
                    pass
    return True
