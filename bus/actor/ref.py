"""The address of an actor, with `tell`, `ask` and `stream`: all that other actors hold of it.

What carries the messages is a `Messenger`; a client's connection is one.
"""

import math
from collections.abc import AsyncGenerator
from typing import Generic, Protocol, TypeVar

import msgspec

from rolloutbus.bus.wire.commands import COMMAND_OF
from rolloutbus.bus.wire.errors import LocalProtocolError, Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem

AnswerT = TypeVar("AnswerT")
DeltaT = TypeVar("DeltaT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)
DeltaT_co = TypeVar("DeltaT_co", covariant=True)
ExpectedT = TypeVar("ExpectedT")

ROUTER = ""
FLEET = "fleet"
STORE = "store"


def worker(name: str) -> str:
    """The address of one worker."""
    return f"worker:{name}"


class Command(msgspec.Struct, frozen=True):
    """A message with its address."""

    kind: str
    """Its literal name, of `bus.wire.commands.COMMANDS`."""
    body: msgspec.Struct
    route: str
    """`fleet`, `store`, `worker:NAME`; empty for the router itself."""


class Messenger(Protocol[AnswerT_co, DeltaT_co]):
    """The part of a connection that a ref needs. Deadlines are seconds from now, above 0."""

    def tell(self, command: Command, deadline_s: float) -> None:
        """Send a command without waiting for its ending."""
        ...

    async def ask(self, command: Command, deadline_s: float) -> AnswerT_co:
        """Send a command and wait for its ending; raises any but `finished`."""
        ...

    def stream(self, command: Command, deadline_s: float) -> AsyncGenerator[DeltaT_co]:
        """Send a command and read its deltas; raises any ending but `finished`."""
        ...


class ActorRef(Generic[AnswerT, DeltaT]):
    """An actor, or all workers at once, as others see it.

    A deadline is seconds from now for the whole request. Every method raises MailboxFull or
    ActorStopped if nothing was sent, and Refused if the deadline is none.
    """

    __slots__ = ("_messenger", "address")

    def __init__(self, address: str, messenger: Messenger[AnswerT, DeltaT]) -> None:
        """`address`: `fleet`, `store`, `worker:NAME`; empty for the router itself."""
        self.address = address
        self._messenger = messenger

    def __repr__(self) -> str:
        return f"ActorRef({self.address!r})"

    def tell(self, message: msgspec.Struct, *, deadline_s: float) -> None:
        """Send it and forget it: whether it is obeyed is never known here."""
        self._messenger.tell(self._command(message, deadline_s), deadline_s)

    async def ask(self, message: msgspec.Struct, *, deadline_s: float) -> AnswerT:
        """Send it and wait for its ending. Leaving early stops a `Generate`.

        Raises:
            Refused: nothing was started: unknown address, or a field is wrong.
            EngineFailed: it could not be done.
            DeadlineExceeded: no ending came; it may have been done.
        """
        return await self._messenger.ask(self._command(message, deadline_s), deadline_s)

    async def ask_for(
        self, expected: type[ExpectedT], message: msgspec.Struct, *, deadline_s: float
    ) -> ExpectedT:
        """Like `ask`, but check that the answer has the expected type.

        Raises:
            RemoteProtocolError: the answer is of another type.
        """
        answer = await self.ask(message, deadline_s=deadline_s)
        if not isinstance(answer, expected):
            raise RemoteProtocolError(
                f"{type(message).__name__} was answered with {type(answer).__name__}, "
                f"not {expected.__name__}"
            )
        return answer

    def stream(self, message: msgspec.Struct, *, deadline_s: float) -> AsyncGenerator[DeltaT]:
        """Send it and read what it brings, piece by piece. Leaving the iterator early stops it.

        Raises:
            As `ask`.
        """
        return self._messenger.stream(self._command(message, deadline_s), deadline_s)

    def _command(self, message: msgspec.Struct, deadline_s: float) -> Command:
        if not 0 < deadline_s < math.inf:
            sentence = f"a deadline is a number of seconds above 0, not {deadline_s}"
            raise Refused(Problem("bad_request", sentence, "not_started", field="deadline_s"))
        kind = COMMAND_OF.get(type(message))
        if kind is None:
            raise LocalProtocolError(f"a {type(message).__name__} is no command")
        return Command(kind, message, self.address)
