"""The socket at which libzmq asks who may come in; answers on its owner's loop."""

from collections.abc import Callable, Sequence

import zmq

from rolloutbus.bus.transport.zmq_sockets import Reader

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
QUESTIONS_AT_ONCE = 64


class ZapHandler:
    """Answers every question of one context, until it is closed: then nobody comes in."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        answer: Callable[[Sequence[bytes]], list[bytes]],
    ) -> None:
        self._answer = answer
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._reader = Reader(self._socket, self._read_some)

    def close(self) -> None:
        """Answer no more."""
        self._reader.close()
        self._socket.close()

    def _read_some(self) -> bool:
        for _ in range(QUESTIONS_AT_ONCE):
            try:
                asker, *question = self._socket.recv_multipart(zmq.NOBLOCK)
                self._socket.send_multipart([asker, *self._answer(question)], zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError:  # the asker is gone: whoever connects asks again
                continue
        return True
