"""A host whose name is looked up slowly, as by a name server that does not answer."""

import asyncio
import socket
import threading
from typing import Any


class SlowNames:
    """Stands in for `socket.getaddrinfo`: the name `HOST` is known once `may_answer` is set."""

    HOST = "slow.test"

    def __init__(self) -> None:
        self._look_up = socket.getaddrinfo
        self._is_asked = threading.Event()
        self.may_answer = threading.Event()

    def __call__(self, host: str, *arguments: Any) -> object:  # noqa: ANN401 - those of getaddrinfo
        if host == self.HOST:
            self._is_asked.set()
            assert self.may_answer.wait(45.0)
            host = "127.0.0.1"
        return self._look_up(host, *arguments)

    async def asked(self) -> None:
        """Waits until somebody wants to know the address of `HOST`."""
        assert await asyncio.to_thread(self._is_asked.wait, 20.0), "nobody has asked for it"
