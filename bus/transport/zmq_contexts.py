"""ZeroMQ contexts: one for all sockets of a process, which ends after their last words."""

import atexit
import ctypes
import os
import secrets
from collections.abc import Iterable
from typing import cast

import zmq

# Frees what was sent uncopied at exit: imported late, it would do so before `_hear_out` waits.
import zmq.utils.garbage  # pyright: ignore[reportUnusedImport]


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of its own: for guarded sockets, since who may come in is asked per context."""
    # libzmq draws its reconnect jitter from rand(), unseeded: without this every process on a
    # machine would come back at the same moments.
    ctypes.CDLL(None).srand(int.from_bytes(secrets.token_bytes(4), "little"))
    context = zmq.Context[zmq.Socket[bytes]]()
    context.set(zmq.MAX_SOCKETS, 16_384)
    return context


def _hear_out(context: zmq.Context[zmq.Socket[bytes]], pid: int) -> None:
    """At the end of the process: wait while closed sockets still have something to say.

    With a socket left open this would wait for ever; who closes nothing has no last words.
    """
    # There is no other list that names monitors, too.
    sockets = cast("Iterable[zmq.Socket[bytes]]", context._sockets)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    if os.getpid() == pid and all(socket.closed for socket in sockets):
        context.term()


class _Contexts:
    """One context per process: a forked child must not use its parent's."""

    def __init__(self) -> None:
        self._by_pid: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}

    def get(self) -> zmq.Context[zmq.Socket[bytes]]:
        pid = os.getpid()
        if pid not in self._by_pid:
            self._by_pid.clear()
            self._by_pid[pid] = new_context()
            atexit.register(_hear_out, self._by_pid[pid], pid)
        return self._by_pid[pid]


own_context = _Contexts().get
"""The context of this process."""
