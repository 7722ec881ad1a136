"""The connection that a frame came over, and its end: libzmq itself closes no single one.

It does tell the descriptor of a frame's connection. Shut down, that connection ends as if its peer
had gone; the descriptor stays libzmq's to close.
"""

import os
import socket
from contextlib import suppress
from typing import NamedTuple

import zmq


class Wire(NamedTuple):
    """One accepted connection. Numbers of descriptors are used again, those of inodes seldom."""

    fd: int
    inode: int


def wire_of(frame: zmq.Frame) -> Wire | None:
    """What a frame came over; None if that is gone already, or libzmq does not tell.

    If it has just gone, this may be a later connection of the same descriptor.
    """
    try:
        # The name of what `zmq.SRCFD` reads; a name can be asked of a frame that is not a copy.
        fd = int(frame.get("__fd"))
        return Wire(fd, os.fstat(fd).st_ino)
    except (zmq.ZMQError, OSError):
        return None


def hang_up(wire: Wire) -> bool:
    """End a connection; False if it has ended."""
    with suppress(OSError):
        return os.fstat(wire.fd).st_ino == wire.inode and hang_up_fd(wire.fd)
    return False


def hang_up_fd(fd: int) -> bool:
    """End the connection that has this descriptor now; False if none has.

    A peer's connection that has just got the number comes back by itself. A socket that listens
    would not; nor would a pair that leads nowhere else, which has no name. Those are spared.
    """
    with suppress(OSError):  # no descriptor, or not of a socket
        link = socket.socket(fileno=fd)
        try:
            if link.getsockname() and not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                link.shutdown(socket.SHUT_RDWR)
                return True
        finally:
            link.detach()
    return False
