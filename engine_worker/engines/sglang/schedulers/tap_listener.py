"""The engine host's end of the scheduler taps: one thread per scheduler that is connected."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rolloutbus.engine_worker.engines.sglang.schedulers.tap_wire import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Message,
    decode,
)


class TapListener:
    """Waits for schedulers, and hands over what they tell, in the order of each."""

    def __init__(self, on_message: Callable[[Message], None], on_gone: Callable[[], None]) -> None:
        """Listen at once, so that a scheduler which fails to start can say why.

        Args:
            on_message: called from the thread of the scheduler that told it; must not block.
            on_gone: a scheduler has gone, whatever the reason; called from its thread.
        """
        self._on_message = on_message
        self._on_gone = on_gone
        self._folder = TemporaryDirectory(prefix="rolloutbus-")
        self.path = str(Path(self._folder.name) / "tap")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, name="sglang-taps", daemon=True).start()

    def hide(self) -> None:
        """Every scheduler is connected: take the socket's path away.

        A process that is killed leaves no directory behind, and nobody else finds the way in.
        """
        self._folder.cleanup()

    def close(self) -> None:
        """Stop listening; connected schedulers end with their engine."""
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            read = threading.Thread(target=self._read, args=(connection,), name="sglang-tap")
            read.daemon = True
            read.start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=1 << 20) as stream:
            while header := stream.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                assert size <= MAX_MESSAGE_BYTES, "a scheduler tap speaks another protocol"
                body = stream.read(size)
                if len(body) < size:
                    break
                self._on_message(decode(body))
        self._on_gone()
