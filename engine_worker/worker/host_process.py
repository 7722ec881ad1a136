"""Starting, watching and ending the process of one engine host."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.engine_worker.host.link import EntriesHandler, HostLink
from rolloutbus.engine_worker.settings import WorkerSettings

STOP_S = 8.0
"""From the end of the link until the host is killed."""

LAST_WORDS_S = 1.0
"""From the end of the host until its link is given up, which a child of the host may hold open."""

FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that a process does not get from its own faults: another program has sent them, or the
kernel for want of memory."""


class HostExit(NamedTuple):
    """How a host ended."""

    reason: str
    was_killed: bool
    """By another program."""


class HostProcess:
    """A running engine host; it dies when this process does."""

    def __init__(self, process: asyncio.subprocess.Process, link: HostLink) -> None:
        self._process = process
        self._link = link
        self._is_blamed: bool | None = None
        """Whether this actor killed it for what it did; None: this actor did not kill it."""

    @classmethod
    async def start(cls, settings: WorkerSettings, on_entries: EntriesHandler) -> "HostProcess":
        """Start a host; its `engine_ready` comes later."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rolloutbus.engine_worker.host",
                f"--fd={theirs.fileno()}",
                f"--parent={os.getpid()}",
                f"--settings-json={msgspec.json.encode(settings).decode()}",
                stdin=asyncio.subprocess.DEVNULL,
                # Standard output belongs to the actor's ready line; libraries print what they like.
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
            )
        return cls(process, await HostLink.open(ours, on_entries))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped from outside (SIGSTOP, a debugger): then it is not hung."""
        return _is_stopped(self.pid)

    def send(self, entry: Entry) -> None:
        """Queue for the end of this loop tick."""
        self._link.send(entry)

    def kill(self) -> None:
        """End it now."""
        if self._process.returncode is None:
            if self._is_blamed is None:  # once killed it does not look stopped any more
                self._is_blamed = not _is_stopped(self.pid)
            self._process.kill()

    async def wait(self) -> HostExit:
        """Wait for its end, and until all that it sent has been delivered; returns how it ended.

        A host that closes its link and does not end is killed.
        """
        ended = asyncio.create_task(self._process.wait())
        closed = asyncio.create_task(self._link.closed())
        try:
            await asyncio.wait((ended, closed), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self.stop()
            code = await ended
            await asyncio.wait((closed,), timeout=LAST_WORDS_S)
        finally:
            ended.cancel()
            closed.cancel()
        if code >= 0:
            return HostExit(f"the engine host exited with code {code}", was_killed=False)
        name = signal.Signals(-code).name
        was_killed = -code in FROM_OUTSIDE and not self._is_blamed
        return HostExit(f"the engine host was ended by {name}", was_killed)

    async def stop(self) -> None:
        """Ask it to close its engine and leave; kill it if it does not."""
        self._link.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()


def _is_stopped(pid: int) -> bool:
    """See `HostProcess.is_stopped`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
