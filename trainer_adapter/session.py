"""A session with a place at a worker, for as long as an `async with` lasts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from bus.errors import ActorStopped, MailboxFull, Refused
from bus.messages.generation import Sampling
from bus.messages.session import CloseSession, OpenedSession, OpenSession, SessionMoved
from trainer_adapter.rollout import Delta, Rollout
from trainer_adapter.rollouts import GenerateOptions, Prompt

if TYPE_CHECKING:
    from trainer_adapter.client import RolloutClient

PASSING = frozenset({"busy", "not_ready", "session_taken"})
"""Refusals of a place that time heals: a client that crashed keeps its places for a while."""
RETRY_S = 0.1
"""At least this long before the next try."""


class SessionOptions(TypedDict, total=False):
    """How a session is opened; all optional."""

    policy: str
    """Whose workers may have it; `default` if absent."""
    lease_s: float
    """Its place is kept this many seconds without a request under way; 60 if absent."""
    grace_s: float
    """After a turn, the next one goes first for this many seconds; 30 if absent."""


class Session:
    """One trajectory: its requests meet the same worker, and its next turn goes first."""

    def __init__(self, client: "RolloutClient", asked: OpenSession, wait_s: float) -> None:
        self._client = client
        self._asked = asked
        self._wait_s = wait_s

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except Refused:
            raise
        except BaseException:
            self._close()  # it may have been opened all the same
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def name(self) -> str:
        """What its requests carry."""
        return self._asked.session

    @property
    def worker(self) -> str:
        """Who has its prefix; empty when the router has given its place away."""
        held = self._client.sessions.get(self.name)
        return held.worker if held is not None else ""

    @property
    def n_moved(self) -> int:
        """How often it had to change its worker, which cost it its prefix cache."""
        held = self._client.sessions.get(self.name)
        return held.n_moved if held is not None else 0

    @property
    def last_move(self) -> SessionMoved | None:
        """From where to where, and why; None if it never moved."""
        held = self._client.sessions.get(self.name)
        return held.last_move if held is not None else None

    async def generate(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """The next turn; arguments and errors as of `RolloutClient.generate`."""
        return await self._client.generate(prompt, sampling, **self._own(options))

    def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta]:
        """The next turn, streamed; arguments and errors as of `RolloutClient.stream`."""
        return self._client.stream(prompt, sampling, **self._own(options))

    async def renew(self) -> None:
        """Let lease and grace begin anew: what runs outside takes longer than thought.

        Raises:
            Refused: the place was free, and has gone to another session.
        """
        await self._ask()

    def _own(self, options: GenerateOptions) -> GenerateOptions:
        return {**options, "session": self.name, "policy": self._asked.policy}

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._wait_s
        while True:
            try:
                await self._ask()
            except Refused as error:
                retry_at = loop.time() + max(RETRY_S, error.retry_after_ms / 1000)
                if error.code not in PASSING or retry_at > give_up_at:
                    raise
                await asyncio.sleep(retry_at - loop.time())
            else:
                return

    async def _ask(self) -> None:
        deadline_s = self._client.connection.settings.control_deadline_s
        await self._client.ref().ask_for(OpenedSession, self._asked, deadline_s=deadline_s)

    def _close(self) -> None:
        """Nobody waits for the answer: who leaves because the router is away is not held up."""
        deadline_s = self._client.connection.settings.control_deadline_s
        # A client that is closed has freed the place with its goodbye; else the lease will.
        with suppress(ActorStopped, MailboxFull):
            self._client.ref().tell(CloseSession(self.name), deadline_s=deadline_s)
