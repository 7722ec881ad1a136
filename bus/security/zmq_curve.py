"""Making CURVE keys, and putting them on sockets."""

import zmq
from zmq.utils import z85

from rolloutbus.bus.security.keys import KeyPair


def new_key_pair(name: str) -> KeyPair:
    """A fresh pair, from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(name, z85.decode(public).hex(), z85.decode(secret))


def dress_server(socket: zmq.Socket[bytes], pair: KeyPair, domain: str) -> None:
    """Before it binds: only who the ZAP handler of its context knows comes in.

    Without ZAP_ENFORCE_DOMAIN a context whose handler has died would let every key in.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.reveal())
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dress_client(socket: zmq.Socket[bytes], pair: KeyPair, server_key: str) -> None:
    """Before it connects: it speaks to the holder of `server_key` or to nobody."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.reveal())
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
