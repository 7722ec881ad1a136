"""A session: one trajectory, whose turns are sampled where its prefix is.

Spec: docs/protocol.md, "Sessions".
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Unpack

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.session import OpenSession
from rolloutbus.trainer_adapter.client.rollout import Delta, Rollout
from rolloutbus.trainer_adapter.client.rollouts import (
    GenerateOptions,
    Prompt,
    SamplingLike,
    TurnOptions,
    ask_of,
)
from rolloutbus.trainer_adapter.client.session_place import SessionPlace
from rolloutbus.trainer_adapter.client.transcript import Transcript

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.client.client import RolloutClient


@strict(options=ask_of)
class Session(SessionPlace):
    """One trajectory: its requests meet the same worker, and its next turn goes first.

    `append` and `sample` keep its tokens in `transcript`, and each turn is sampled after all of
    them; `generate` and `stream` take whatever prompt they are given and leave `transcript` alone.
    """

    def __init__(
        self,
        client: "RolloutClient",
        asked: OpenSession,
        wait_s: float = 0.0,
        transcript: Transcript | None = None,
    ) -> None:
        super().__init__(client, asked, wait_s)
        self.transcript = Transcript() if transcript is None else transcript
        """Its turns so far."""
        self._is_sampling = False

    async def generate(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> Rollout:
        """A request of the session; arguments and errors as of `RolloutClient.generate`."""
        self._require_open()
        return await self._client.generate(prompt, sampling, **self._own(options))

    def stream(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Delta]:
        """The same, streamed; arguments and errors as of `RolloutClient.stream`."""
        self._require_open()
        return self._client.stream(prompt, sampling, **self._own(options))

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
            As `RolloutClient.generate`; nothing is added then. Refused: nothing was appended yet.
        """
        return await self.replace(len(self.transcript.turns), sampling, **options)

    async def sample_stream(
        self, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Delta]:
        """Sample the next turn, streamed; it is added with the last delta.

        Leaving the iterator early aborts the request; nothing is added then, nor if the transcript
        was changed meanwhile.

        Raises:
            As `RolloutClient.generate`.
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
            As `RolloutClient.generate`; the transcript stays as it was then.
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
        return Session(self._client, asked, wait_s, self.transcript.before(n))

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
            self._client.connection.require_known_fleet()
        if len(kept):
            return
        message = f"session {self.name[:64]!r} has no tokens before this turn"
        way = "`append` its prompt first, then sample"
        raise Refused(bad_request("prompt", f"{message}: {way}"))

    def _check_idle(self) -> None:
        if self._is_sampling:
            message = f"session {self.name[:64]!r} is sampling a turn; branch to sample another one"
            raise Refused(Problem("bad_request", message, "not_started", field="session"))
