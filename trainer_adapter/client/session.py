"""A session: one trajectory; its turns run on the worker that caches their prefix.

Spec: docs/protocol.md, "Sessions".
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager, suppress
from typing import NoReturn, Self, Unpack

import msgspec

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import ActorStopped, MailboxFull, Refused, cannot_be_pickled
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)
from rolloutbus.trainer_adapter.client.asks import (
    GenerateOptions,
    Prompt,
    SamplingLike,
    TurnOptions,
    ask_of,
    deadline_of,
)
from rolloutbus.trainer_adapter.client.commands import Commands
from rolloutbus.trainer_adapter.client.connection import Connection
from rolloutbus.trainer_adapter.client.core.results import Delta, Rollout, rollout_in
from rolloutbus.trainer_adapter.client.transcript import Transcript

PASSING = frozenset({"busy", "not_ready", "session_taken"})
"""Refusals of a place that time heals: a client that crashed keeps its places for a while."""
RETRY_S = 0.1
"""At least this long before the next try."""


@strict(options=ask_of)
class Session:
    """One trajectory: its requests meet the same worker, and its next turn goes first.

    `append` and `sample` keep its tokens in `transcript`, and each turn is sampled after all of
    them; `generate` and `stream` take whatever prompt they are given and leave `transcript` alone.
    """

    def __init__(
        self,
        connection: Connection,
        asked: OpenSession,
        wait_s: float = 0.0,
        transcript: Transcript | None = None,
    ) -> None:
        self._connection = connection
        self._router = Commands(connection).ref()
        self._asked = asked
        self._wait_s = wait_s
        self._is_open = self._was_open = False
        self.transcript = Transcript() if transcript is None else transcript
        """Its turns so far."""
        self._is_sampling = False

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the router's address and the name {self.name!r}, and open it there"
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name of the session; its requests carry it."""
        return self._asked.session

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._is_open

    @property
    def worker(self) -> str:
        """Name of the worker that caches the prefix; empty when the router has freed the place."""
        held = self._connection.sessions.get(self.name)
        return held.worker if held is not None else ""

    @property
    def n_moved(self) -> int:
        """How often it had to change its worker, which cost it its prefix cache."""
        held = self._connection.sessions.get(self.name)
        return held.n_moved if held is not None else 0

    @property
    def last_move(self) -> SessionMoved | None:
        """From where to where, and why; None if it never moved."""
        held = self._connection.sessions.get(self.name)
        return held.last_move if held is not None else None

    async def open(self) -> Self:
        """Takes a place without `async with`; call `close` to give it back.

        Raises:
            Refused: as `RolloutClient.session`.
        """
        self._connection.require_home()
        try:
            await self._admitted()
        except Refused:
            self._let_go()
            raise
        except BaseException:
            self.close()  # it may have been opened all the same
            raise
        self._is_open = self._was_open = True
        return self

    async def renew(self) -> None:
        """Renews lease and grace, e.g. when work outside the engine takes longer than expected.

        Raises:
            Refused: the place was free, and has gone to another session; or this one is not open.
        """
        self._require_open()
        await self._ask()

    def close(self) -> None:
        """Give the place back; what runs goes on.

        Nobody waits for the answer: who leaves because the router is away is not held up.
        """
        self._connection.require_home()
        self._is_open = False
        if not self._let_go():
            return  # the place is another's, or was never this one's
        deadline_s = self._connection.settings.control_deadline_s
        # A client that is closed has freed the place with its goodbye; else the lease will.
        with suppress(ActorStopped, MailboxFull):
            self._router.tell(CloseSession(self.name), deadline_s=deadline_s)

    async def generate(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> Rollout:
        """A request of the session; arguments and errors as of `RolloutClient.generate`."""
        self._require_open()
        ask = ask_of(prompt, sampling, **self._own(options))
        return rollout_in(await self._connection.ask(ask, deadline_of(options)))

    def stream(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Delta]:
        """The same, streamed; arguments and errors as of `RolloutClient.stream`."""
        self._require_open()
        ask = ask_of(prompt, sampling, stream=True, **self._own(options))
        return self._connection.stream(ask, deadline_of(options))

    def append(self, tokens: Prompt) -> int:
        """Add tokens that no model chose, int32 [k]; returns the turn's index in the transcript.

        Raises:
            Refused: not token ids; or a turn is being sampled; or the session is closed.
        """
        self._require_not_closed()
        self._check_idle()
        return self.transcript.append(tokens)

    async def sample(self, sampling: SamplingLike, **options: Unpack[TurnOptions]) -> Rollout:
        """Sample the next turn after the whole transcript, and add it.

        Raises:
            Refused: nothing was appended yet.
            BusError: as `RolloutClient.generate`; nothing is added then.
        """
        return await self.replace(len(self.transcript.turns), sampling, **options)

    async def sample_stream(
        self, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Delta]:
        """Sample the next turn, streamed; it is added with the last delta.

        Leaving the iterator early aborts the request; nothing is added then, nor if the transcript
        was changed meanwhile.

        Raises:
            BusError: as `RolloutClient.generate`.
        """
        self._require_open()
        self._check_idle()
        self._require_tokens(self.transcript)
        turns = self.transcript.turns
        deltas = self.stream(self.transcript.tokens, sampling, **options)
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.rollout is not None and self.transcript.turns == turns:
                    self.transcript.add(delta.rollout)
                yield delta

    async def replace(
        self, turn: int, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> Rollout:
        """Sample a turn anew: it and all after it are forgotten once the new one is there.

        Args:
            turn: index in the transcript; negative ones count from the end.
            sampling: how tokens are drawn.
            options: as of `RolloutClient.generate`.

        Raises:
            BusError: as `RolloutClient.generate`; the transcript stays as it was then.
        """
        with self._sampling():
            kept = self.transcript.before(turn)
            self._require_tokens(kept)
            rollout = await self.generate(kept.tokens, sampling, **options)
            self.transcript.rewind(len(kept.turns))
            self.transcript.add(rollout)
        return rollout

    def rewind(self, turn: int) -> None:
        """Forget a turn and all after it, so that others can follow.

        Raises:
            Refused: there is no such turn; or a turn is being sampled; or the session is closed.
        """
        self._require_not_closed()
        self._check_idle()
        self.transcript.rewind(turn)

    def branch(
        self,
        name: str,
        *,
        before: int | None = None,
        wait_s: float = 0.0,
        lease_s: float | None = None,
        grace_s: float | None = None,
    ) -> "Session":
        """Another session with a copy of the transcript, at the worker that has its prefix.

        It is opened as any other, by `async with` or `open`, and goes its own way.

        Args:
            name: of the new session, unique in the fleet.
            before: turn at which the copy ends; all turns are copied if None.
            wait_s: how long to wait for a place, in seconds.
            lease_s: as of `RolloutClient.session`; this session's if None.
            grace_s: the same.

        Raises:
            Refused: there is no such turn; on entering, as of `RolloutClient.session`. If only that
                worker has no room for it, it goes elsewhere: see its `worker`.
        """
        n = len(self.transcript.turns) if before is None else before
        mine = self._asked
        asked = OpenSession(
            name,
            mine.policy,
            mine.lease_s if lease_s is None else lease_s,
            mine.grace_s if grace_s is None else grace_s,
            self.worker,
        )
        return Session(self._connection, asked, wait_s, self.transcript.before(n))

    def _own(self, options: TurnOptions) -> GenerateOptions:
        return {**options, "session": self.name, "policy": self._asked.policy}

    @contextmanager
    def _sampling(self) -> Generator[None]:
        self._require_open()
        self._check_idle()
        self._is_sampling = True
        try:
            yield
        finally:
            self._is_sampling = False

    def _require_tokens(self, kept: Transcript) -> None:
        if any(turn.is_sampled for turn in kept.turns):
            # One transcript would hold versions of two fleets, which nobody could tell apart.
            self._connection.require_known_fleet()
        if len(kept):
            return
        message = f"session {self.name[:64]!r} has no tokens before this turn"
        way = "`append` its prompt first, then sample"
        raise Refused(bad_request("prompt", f"{message}: {way}"))

    def _check_idle(self) -> None:
        if self._is_sampling:
            message = f"session {self.name[:64]!r} is sampling a turn; branch to sample another one"
            raise Refused(Problem("bad_request", message, "not_started", field="session"))

    def _require_open(self) -> None:
        """Check that it has a place."""
        self._require_not_closed()
        if not self._is_open:
            raise self._not_open("is not open yet: enter")

    def _require_not_closed(self) -> None:
        """Check that it has a place, or may still get one."""
        if self._was_open and not self._is_open:
            raise self._not_open("is closed: branch from")

    def _not_open(self, why: str) -> Refused:
        way = "it by `async with` or `with`, or `open()`"
        return Refused(bad_request("session", f"session {self.name[:64]!r} {why} {way}"))

    def _claim(self) -> None:
        """Become the only open session of its name in this client."""
        other = self._connection.session_holders.setdefault(self.name, self)
        has_lost_it = other.is_open and not other.worker
        if other is not self and not has_lost_it:
            message = f"session {self.name[:64]!r} is open in this client already: use that one,"
            message += " `branch` from it under another name, or close it first"
            raise Refused(Problem("session_taken", message, "not_started", field="session"))
        self._connection.session_holders[self.name] = self

    def _let_go(self) -> bool:
        """Whether the place was its own until now."""
        holders = self._connection.session_holders
        return holders.get(self.name) is self and holders.pop(self.name) is self

    async def _admitted(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._wait_s
        while True:
            try:
                self._claim()
                await self._ask()
            except Refused as error:
                retry_at = loop.time() + max(RETRY_S, error.retry_after_ms / 1000)
                if error.code not in PASSING or retry_at > give_up_at:
                    raise
                await asyncio.sleep(retry_at - loop.time())
            else:
                return

    async def _ask(self) -> None:
        deadline_s = self._connection.settings.control_deadline_s
        asked = msgspec.structs.replace(self._asked, worker=self.worker or self._asked.worker)
        await self._router.ask_for(OpenedSession, asked, deadline_s=deadline_s)
