"""What becomes of a socket's connections, as libzmq itself reports it."""

import asyncio
from collections.abc import Callable

import zmq
import zmq.utils.monitor


class Monitor:
    """Tells what becomes of a socket's connections, from libzmq's own events."""

    def __init__(
        self, socket: zmq.Socket[bytes], events: int, on_events: Callable[[set[str]], None]
    ) -> None:
        """Call `on_events` with the addresses concerned, once for all events that wait."""
        self._loop = asyncio.get_running_loop()
        self._owner = socket
        monitor = socket.get_monitor_socket(events)
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
            self._owner.disable_monitor()
            self._socket.close()

    def _drain(self) -> None:
        if self._is_closed:
            return
        addresses: set[str] = set()
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                break
            addresses.add(event["endpoint"].decode())
        if addresses:
            self._on_events(addresses)
