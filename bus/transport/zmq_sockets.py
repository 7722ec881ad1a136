"""ZeroMQ sockets: contexts, options, binding, and what becomes of single connections.

libzmq closes no single connection. It does tell the descriptor of a frame's connection: when that
is shut down, the connection ends as if its peer had gone; the descriptor stays libzmq's to close.
"""

import asyncio
import atexit
import ctypes
import errno
import os
import secrets
import socket as system_socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import zmq
import zmq.utils.garbage  # pyright: ignore[reportUnusedImport]
import zmq.utils.monitor

from rolloutbus.bus.actor.resources import is_scarce, too_few_fds
from rolloutbus.bus.transport.endpoints import require_local
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES

_OTHERS = 0o077
"""Permissions of the group and of everybody else."""
HELD_MESSAGES = 100_000
"""Read and not yet handled, at most; beyond that some are lost."""
HANDOVER_LOOKS, HANDOVER_LOOK_S = 100, 0.01
"""At an address that is in use, perhaps by a socket of this process that was closed just now:
libzmq lets go of it in a thread of its own."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A new context. Guarded sockets need one of their own: keys are checked per context."""
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


GONE_MS = 10_000
"""Without a sign of life from a peer's system, or with no room for what we send it."""
CURVE_BYTES = 64
"""Room for what encryption adds to a frame: 33 bytes."""


def new_socket(
    kind: int, context: zmq.Context[zmq.Socket[bytes]] | None = None
) -> zmq.Socket[bytes]:
    """A socket with the options that every socket here has."""
    try:
        socket = (context or own_context()).socket(kind)
    except zmq.ZMQError as error:
        if error.errno != errno.EMFILE:
            raise
        raise SettingsError(f"no socket can be opened: {too_few_fds()}") from error
    socket.setsockopt(zmq.LINGER, 0)
    # Any domain makes libzmq refuse peers of ZMTP 1 and 2, who need no handshake: a web request is
    # one, and each leaves some memory behind. Nobody is asked about the domain, except by a guard.
    socket.setsockopt(zmq.ZAP_DOMAIN, b"none")
    limit_frames(socket, MAX_BODY_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    _keep_alive(socket)
    return socket


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """The system notices a host that is gone; heartbeats notice a process that does not work.

    ZMTP's own pings stay off: see docs/decisions/0007-no-pings-of-the-transport.md.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_MAXRT, GONE_MS)


def allow_v6(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Allow an IPv6 address, before `bind` or `connect`; sockets take IPv4 only by default."""
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)


def limit_frames(socket: zmq.Socket[bytes], size_bytes: int) -> None:
    """End connections that send a larger frame, before there is memory for it.

    Before `bind` or `connect`. The limit is that of the largest legal frame, and a little more.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, size_bytes + CURVE_BYTES)


def bind_local(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """As `bind_anywhere`, for a socket without keys.

    Raises:
        SettingsError: not a local address, or in use, or an ipc path that others can reach; the
            socket is closed.
    """
    try:
        require_local(endpoint)
        require_private_dir(endpoint)
    except SettingsError:
        socket.close()
        raise
    return bind_anywhere(socket, endpoint)


def bind_anywhere(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind; returns the endpoint with its real port number.

    Raises:
        SettingsError: the address is in use or cannot be had; the socket is closed.
    """
    allow_v6(socket, endpoint)
    problem = _bind_once(socket, endpoint)
    for _ in range(HANDOVER_LOOKS):
        if problem != errno.EADDRINUSE:
            break
        time.sleep(HANDOVER_LOOK_S)
        problem = _bind_once(socket, endpoint)
    if problem:
        socket.close()
        raise SettingsError(f"cannot listen on {endpoint}: {zmq.strerror(problem)}")
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def _bind_once(socket: zmq.Socket[bytes], endpoint: str) -> int:
    """The error number of an attempt to bind; 0: it is bound."""
    if is_taken(endpoint):
        return errno.EADDRINUSE
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        return error.errno or errno.EINVAL
    return 0


def is_taken(endpoint: str) -> bool:
    """Whether a process listens on this ipc path; False for other endpoints.

    libzmq would take the path over without a word, and leave its owner deaf.
    """
    if not endpoint.startswith("ipc://"):
        return False
    with system_socket.socket(system_socket.AF_UNIX, system_socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a full backlog is an answer, too
        return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)


def require_private_dir(endpoint: str) -> None:
    """Refuse an ipc path without keys that other users can reach: they could take every role.

    Raises:
        SettingsError: its directory is not this user's alone.
    """
    if not endpoint.startswith("ipc://"):
        return
    directory = Path(endpoint.removeprefix("ipc://")).absolute().parent
    try:
        found = directory.stat()
    except OSError as error:
        raise SettingsError(f"{endpoint}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise SettingsError(f"{endpoint}: {directory} must be this user's alone: chmod 700 it")


class Wire(NamedTuple):
    """Identifies one accepted connection; the inode tells it from a later one with the same fd."""

    fd: int
    inode: int


def wire_of(frame: zmq.Frame) -> Wire | None:
    """The connection of a frame; None if it is gone, or libzmq does not know it.

    If it has just gone, this may be a later connection of the same descriptor.
    """
    try:
        # The name of what `zmq.SRCFD` reads; a name can be asked of a frame that is not a copy.
        fd = int(frame.get("__fd"))
        return Wire(fd, os.fstat(fd).st_ino)
    except (zmq.ZMQError, OSError):
        return None


def address_in(frame: zmq.Frame) -> str:
    """IP address of the other end of a frame's connection; empty if there is none."""
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
    # Of an ipc connection it is `localhost:USER:GROUP:PROCESS`.
    return "" if address.startswith("localhost:") else address


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
        link = system_socket.socket(fileno=fd)
        try:
            listens = link.getsockopt(system_socket.SOL_SOCKET, system_socket.SO_ACCEPTCONN)
            if link.getsockname() and not listens:
                link.shutdown(system_socket.SHUT_RDWR)
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


class EventFeed:
    """Hears one publisher of this machine on a thread, which ends with `close`.

    For publishers that do not speak our protocol, such as an engine's cache: in processes that we
    started, at an ipc path in a directory that only we can enter. The publisher may come later.
    """

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
