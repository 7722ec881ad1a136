"""What becomes of a socket's connections, as libzmq itself reports it."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import zmq
import zmq.utils.monitor


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
