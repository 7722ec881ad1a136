"""Single connections of a ZeroMQ socket: what becomes of them, and how to end one.

libzmq closes no single connection. It does tell the descriptor of a frame's connection: when that
is shut down, the connection ends as if its peer had gone; the descriptor stays libzmq's to close.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

import zmq
import zmq.utils.monitor

from rolloutbus.bus.actor.resources import is_scarce
from rolloutbus.bus.transport.ports import PortCounters


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


class LinkEvent(NamedTuple):
    """Something that happened to a connection."""

    address: str
    value: int
    """What libzmq tells about it: the descriptor of an accepted connection, or an errno."""
    kind: int
    """Which of libzmq's events."""


class Monitor:
    """Tells what becomes of a socket's connections, from libzmq's own events."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        events: int,
        on_events: Callable[[Sequence[LinkEvent]], None],
    ) -> None:
        """Call `on_events` with what happened, once for all events that wait."""
        self._loop = asyncio.get_running_loop()
        self._owner = socket
        address = f"inproc://monitor-{secrets.token_hex(8)}"
        socket.monitor(address, events)
        context = cast("zmq.Context[zmq.Socket[bytes]]", socket.context)  # pyright: ignore[reportUnknownMemberType] - pyzmq leaves it open
        monitor = context.socket(zmq.PAIR)
        # With a limit, libzmq's own thread would wait here for a reader that is busy: no link would
        # move, and closing the monitor would wait for ever.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        self._socket = monitor
        self._on_events = on_events
        self._fd = int(monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)
        self._is_closed = False

    def close(self) -> None:
        """Hear no more."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            if not self._owner.closed:
                self._owner.disable_monitor()
            self._socket.close(0)

    def _drain(self) -> None:
        if self._is_closed:
            return
        events: list[LinkEvent] = []
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                break
            address = event["endpoint"].decode()
            events.append(LinkEvent(address, event["value"], int(event["event"])))
        if events:
            self._on_events(events)


class ConnectionLimit:
    """Ends new connections of one listening socket while descriptors are scarce.

    Without a free descriptor libzmq can neither take a connection nor refuse it: it tries again at
    once, for ever, on a whole core. To stop listening would end the links that exist. So a
    connection that comes too late is taken and ended; the system tells the peer at once.
    """

    def __init__(self, listener: zmq.Socket[bytes], counters: PortCounters) -> None:
        self._counters = counters
        self._monitor = Monitor(listener, zmq.EVENT_ACCEPTED, self._accepted)

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._monitor.close()

    def _accepted(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            if is_scarce(event.value):
                self._counters.turned_away += 1
                # If libzmq has closed it already, the number may be somebody else's by now: a later
                # connection's, which must go as well, or one of our own, which comes back.
                hang_up_fd(event.value)
