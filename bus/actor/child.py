"""One child process from its start to its end: a group of its own, one ready line, a log file."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from rolloutbus.bus.actor.process import (
    PARENT_VARIABLE,
    ActorExit,
    read_notice,
    read_progress,
    read_ready,
)
from rolloutbus.bus.actor.resources import NO_ROOM
from rolloutbus.bus.actor.variables import PROGRESS

_READ_BYTES = 65_536
_TAIL_BYTES = 16_384


OnReady = Callable[[dict[str, str]], None]
"""Gets the endpoints of a child as soon as it announces them."""
OnNotice = Callable[[str], None]
"""Gets what a child says to people, which its log may have no room for."""
OnProgress = Callable[[str], None]
"""Gets what a child does until it is ready, as soon as it says that."""


class Child(Protocol):
    """One incarnation of a program, on this machine or on another one."""

    @property
    def pid(self) -> int:
        """Process id, on its machine; 0 while it has none yet."""
        ...

    @property
    def node(self) -> str:
        """The machine, by the name that its launcher knows; empty: this one, or none yet."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to end."""
        ...

    async def wait(self) -> int | None:
        """Wait for its end; returns its exit status, or minus the number of a signal.

        None: nobody knows, because it was lost with its machine.
        """
        ...

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        ...

    async def stop(self) -> None:
        """Have it leave, in its time of grace; then kill it. Returns when it has ended."""
        ...


class Program(Protocol):
    """What a supervisor keeps running; fields as of `ProcessSpec`."""

    @property
    def name(self) -> str: ...  # noqa: D102 - as of `ProcessSpec`
    @property
    def log(self) -> Path: ...  # noqa: D102 - as of `ProcessSpec`
    @property
    def ready_timeout_s(self) -> float: ...  # noqa: D102 - as of `ProcessSpec`
    @property
    def may_leave(self) -> bool: ...  # noqa: D102 - as of `ProcessSpec`

    async def start(self, on_ready: OnReady, on_notice: OnNotice, on_progress: OnProgress) -> Child:
        """Begin one incarnation; does not wait until it is ready."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A program to run on this machine and how to treat it."""

    name: str
    """Unique under its supervisor."""
    command: Sequence[str]
    log: Path
    """Gets what it prints, appended."""
    environment: Mapping[str, str] | None = None
    """None: inherited."""
    ready_timeout_s: float = 0.0
    """From its start to its ready line, at most; 0: for ever."""
    grace_s: float = 5.0
    """From SIGTERM to SIGKILL."""
    may_leave: bool = False
    """Exit status 0 is its own decision and final; otherwise it is started again."""

    async def start(
        self, on_ready: OnReady, on_notice: OnNotice, on_progress: OnProgress
    ) -> "ChildProcess":
        """Start the process; see `ChildProcess.start`."""
        return await ChildProcess.start(self, on_ready, on_notice, on_progress)


@dataclass(slots=True)
class ChildProcess:
    """A running child. It and what it starts are one process group, which ends as one."""

    spec: ProcessSpec
    process: asyncio.subprocess.Process
    on_ready: OnReady
    on_notice: OnNotice
    on_progress: OnProgress
    node = ""
    _pipe: int
    _log: BinaryIO
    _line: bytearray = field(default_factory=bytearray)

    @classmethod
    async def start(
        cls, spec: ProcessSpec, on_ready: OnReady, on_notice: OnNotice, on_progress: OnProgress
    ) -> "ChildProcess":
        """Start it.

        Args:
            spec: what to start.
            on_ready: gets its endpoints as soon as it announces them.
            on_notice: gets what it says to people, which its log may have no room for.
            on_progress: gets what it does until it is ready, as soon as it says that.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        log = _opened(spec.log)
        # A pipe of our own: asyncio would count the process as running for as long as some
        # grandchild keeps its stdout open.
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=log,
                env={
                    **(os.environ if spec.environment is None else spec.environment),
                    PARENT_VARIABLE: str(os.getpid()),
                    PROGRESS: "supervisor",
                },
                # Ctrl-C in a terminal must reach the supervisor only: it ends them in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            log.close()
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        child = cls(spec, process, on_ready, on_notice, on_progress, ours, log)
        asyncio.get_running_loop().add_reader(ours, child._read)
        return child

    @property
    def pid(self) -> int:
        """Process id, and the id of its group."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.returncode is not None

    async def wait(self) -> int:
        """Wait for its end; returns its exit status, or minus the number of a signal."""
        status = await self.process.wait()
        if not self._log.closed:
            # Whatever it left behind has nobody to work for.
            self.kill()
            self._drain()
            self._unread()
            self._log.close()
        return status

    def kill(self) -> None:
        """SIGKILL to the whole group; nothing once it has ended, for its id may be in use again."""
        if self._log.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the group if it takes longer than its grace."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
        try:
            async with asyncio.timeout(self.spec.grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._unread()
            return
        *lines, rest = (self._line + data).split(b"\n")
        self._line = bytearray(rest[-_READ_BYTES:])
        for line in lines:
            self._heard(bytes(line))

    def _heard(self, line: bytes) -> None:
        endpoints = read_ready(line)
        if endpoints is not None:
            self.on_ready(endpoints)
        elif sentence := read_notice(line):
            self.on_notice(sentence)  # it stands in the log already, if there is room
        elif doing := read_progress(line):
            self.on_progress(doing)
        else:
            with contextlib.suppress(OSError):  # a full disk must not end us
                self._log.write(line + b"\n")

    def _unread(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _drain(self) -> None:
        """Its last lines must not be lost with it."""
        with contextlib.suppress(BlockingIOError):
            while self._pipe >= 0 and (data := os.read(self._pipe, _READ_BYTES)):
                for line in (self._line + data).splitlines():
                    self._heard(bytes(line))
                self._line.clear()


def _opened(log: Path) -> BinaryIO:
    """The log; nothing at all if the disk has no room for its name."""
    try:
        return log.open("ab", buffering=0)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return Path(os.devnull).open("ab", buffering=0)


def how_it_ended(status: int | None) -> str:
    """A clause for people: `exited with status 1`, `was ended by SIGKILL`."""
    if status is None:
        return "was lost"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    match status:
        case ActorExit.STOPPED:
            return "has left"
        case ActorExit.REPLACED:
            return "was replaced by another process of its name"
        case ActorExit.FORBIDDEN:
            return "has no rights with its key"
        case ActorExit.REJECTED:
            return "is a second router: another one holds its fleet"
        case ActorExit.ENGINE:
            return "gave its engine up"
        case _:
            return f"exited with status {status}"


def last_lines(log: Path, n_lines: int) -> list[str]:
    """The end of a log, without empty lines; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-n_lines:]
