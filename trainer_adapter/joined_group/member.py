"""A trainer's process group as its member sees it from outside: a child process is in it."""

import asyncio
import mmap
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from rolloutbus.bus.actor.child import how_it_ended
from rolloutbus.bus.actor.process import PARENT_VARIABLE
from rolloutbus.bus.wire.errors import DeadlineExceeded, PeerLost, Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.joined_group.orders import Answer, Invitation, Receive

QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
"""Of the child: torch logs stacks of C++ for errors that it raises, too."""


class JoinedGroup:
    """One rank in a trainer's group. Make it with `join`; `end` it."""

    def __init__(
        self,
        invitation: Invitation,
        process: asyncio.subprocess.Process,
        memories: socket.socket,
        on_over: Callable[[str], None],
    ) -> None:
        """Only `join` makes one."""
        self.name = invitation.name
        self._process = process
        self._memories = memories
        """Descriptors go to the child here."""
        self._on_over = on_over
        self.problem = ""
        """Why the group is over; empty while it is not."""
        self._waiting: asyncio.Future[Answer] | None = None
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def join(cls, invitation: Invitation, on_over: Callable[[str], None]) -> "JoinedGroup":
        """Meet the other ranks.

        Args:
            invitation: which group, and as whom.
            on_over: called once, with the reason, when the group is over.

        Raises:
            Refused: `unsupported`: there is no GPU for nccl.
            PeerLost: the group cannot be.
            DeadlineExceeded: a rank did not come.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "rolloutbus.trainer_adapter.joined_group"),
                    *(msgspec.json.encode(invitation).decode(), str(theirs.fileno())),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env={**QUIET, **os.environ, PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends it
                )
        except BaseException:
            ours.close()
            raise
        group = cls(invitation, process, ours, on_over)
        try:
            await group._answered(invitation.timeout_s)
        except BaseException as error:
            await group.end("it was not joined")
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(_not_met(invitation), outcome="not_started") from error
            raise
        return group

    async def receive(self, order: Receive, timeout_s: float) -> torch.Tensor:
        """Take a bucket from rank 0: uint8 [size_bytes]. One call after another.

        The group is over if it fails or is cancelled: rank 0 then waits no longer, either.

        Raises:
            PeerLost: the group is over.
            DeadlineExceeded: it did not come.
        """
        self.require_joined()
        fd = os.memfd_create("rolloutbus-bucket")
        try:
            os.ftruncate(fd, order.size_bytes)
            bucket = torch.frombuffer(mmap.mmap(fd, order.size_bytes), dtype=torch.uint8)
            socket.send_fds(self._memories, [b"."], [fd])
        except ConnectionError:  # it has died, and nobody has heard of that yet
            await self.end("its process is gone")
            self.require_joined()
            raise
        finally:
            os.close(fd)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            await self._answered(timeout_s)
        except TimeoutError as error:
            why = f"what rank 0 was to send did not come within {timeout_s:g} s"
            await self.end(why)
            raise DeadlineExceeded(f"group {self.name!r} is over: {why}") from error
        except asyncio.CancelledError:
            await self.end("who asked for a bucket went away while it was received")
            raise
        return bucket

    def require_joined(self) -> None:
        """Raises PeerLost: the group is over."""
        if self.problem:
            message = f"group {self.name!r} is over: {self.problem}"
            raise PeerLost(message, outcome="not_started")

    async def end(self, why: str) -> None:
        """Leave the group; a call that receives meanwhile raises PeerLost. Idempotent."""
        self._over(why)
        await self._listening

    async def _answered(self, timeout_s: float) -> None:
        """Wait for an answer.

        Raises:
            TimeoutError: none came.
            Refused, PeerLost: it did not go well, or the child has ended.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._waiting
        finally:
            self._waiting = None
        if answer.is_unsupported:
            raise Refused(Problem("unsupported", answer.problem, "not_started", field="backend"))
        if answer.problem:
            self._over(answer.problem)
            self.require_joined()

    async def _listen(self) -> None:
        """Hear what the child says, until its end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = msgspec.json.decode(line, type=Answer)
            if self._waiting is None:
                self._over(answer.problem)
            elif not self._waiting.done():
                self._waiting.set_result(answer)
        status = await self._process.wait()
        self._memories.close()
        self._over(f"its process {how_it_ended(status)}")

    def _over(self, why: str) -> None:
        if self.problem:
            return
        self.problem = why
        with suppress(ProcessLookupError):
            self._process.kill()  # nccl may keep it from ending by itself
        self._on_over(why)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Answer(why))


def _not_met(invitation: Invitation) -> str:
    return (
        f"the {invitation.world_size} ranks of group {invitation.name!r} did not meet within "
        f"{invitation.timeout_s:g} s at {invitation.url}. The whole fleet is one rank there, "
        f"{invitation.rank}: a world_size that counts its workers or GPUs waits for ranks that "
        "nobody is"
    )
