"""What somebody else's program publishes on this machine, read on a thread of its own.

For publishers that do not speak our protocol, such as an engine's cache: in processes that we
started, at an ipc path in a directory that only we can enter.
"""

import threading
from collections.abc import Callable, Sequence

import zmq

from rolloutbus.bus.transport.endpoints import require_local
from rolloutbus.bus.transport.ipc_paths import require_private_dir
from rolloutbus.bus.transport.zmq_sockets import allow_v6, new_context, new_socket

HELD_MESSAGES = 100_000
"""Read and not yet handled, at most; beyond that some are lost."""


class EventFeed:
    """Hears one publisher, which may come later; a thread ends with `close`."""

    def __init__(self, endpoint: str, on_message: Callable[[Sequence[bytes]], None]) -> None:
        """Subscribe to everything there.

        Args:
            endpoint: where the publisher binds.
            on_message: called with the frames of each message, on the feed's thread.

        Raises:
            SettingsError: others than we could publish there.
        """
        require_local(endpoint)
        require_private_dir(endpoint)
        self._on_message = on_message
        self._context = new_context()
        socket = new_socket(zmq.SUB, self._context)
        socket.setsockopt(zmq.RCVHWM, HELD_MESSAGES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        allow_v6(socket, endpoint)
        socket.connect(endpoint)
        self._thread = threading.Thread(
            target=self._read, args=(socket,), name="event-feed", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Hear no more."""
        self._context.term()  # wakes the thread, which closes its socket
        self._thread.join()

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while True:
                try:
                    frames = socket.recv_multipart()
                except zmq.ContextTerminated:
                    return
                self._on_message(frames)
