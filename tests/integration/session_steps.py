"""The steps of a session, each compared with one request that knows nothing of it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from rolloutbus import Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.types import Session
from tests.integration.live_fleet import DEADLINE_S

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=300, temperature=0.0, ignore_eos=True)
OPTIONS: GenerateOptions = {"want": Want(cached_tokens=True), "deadline_s": DEADLINE_S}


def n_cached(rollout: Rollout) -> int:
    """How much of its prompt was not computed again."""
    return int(rollout.arrays["cached_tokens"][0])


@dataclass(frozen=True)
class Steps:
    """A fleet with one worker whose cache finds whole blocks of `block` tokens."""

    client: RolloutClient
    block: int

    @asynccontextmanager
    async def session(self, name: str, n_prompt: int) -> AsyncGenerator[Session]:
        """A session with a prompt of so many tokens and one sampled turn."""
        async with self.client.session(name) as session:
            session.append([3 + (7 * i + len(name)) % 50 for i in range(n_prompt)])
            await session.sample(GREEDY, **OPTIONS)
            yield session

    def finds(self, rollout: Rollout, n_known: int) -> bool:
        """Whether all whole blocks of the known tokens before its prompt's last one were found."""
        n = min(n_known, rollout.n_prompt_tokens - 1)
        return n_cached(rollout) >= n - n % self.block

    async def is_as_fresh(self, session: Session) -> bool:
        """Whether its last turn is what an engine without any cache samples after the others."""
        *_, last = session.transcript.turns
        before = session.transcript.before(-1).tokens
        await self.client.flush_cache(deadline_s=DEADLINE_S)
        fresh = await self.client.generate(before, GREEDY, **OPTIONS)
        assert n_cached(fresh) == 0
        return fresh.tokens.tolist() == last.tokens.tolist()


async def appended_turns_find_the_turns_before_them(steps: Steps) -> None:
    async with steps.session("append", 70) as session:
        n_known = len(session.transcript) - 1  # its last token was sampled, and never computed
        session.append([40, 41, 42, 43, 44])
        rollout = await session.sample(GREEDY, **OPTIONS)
        assert steps.finds(rollout, n_known)
        assert session.transcript.loss_mask.tolist() == [0] * 70 + [1] * 12 + [0] * 5 + [1] * 12
        assert await steps.is_as_fresh(session)


async def branches_find_what_they_share(steps: Steps) -> None:
    async with steps.session("trunk", 70) as session:
        session.append([40, 41, 42])
        trunk = session.transcript.tokens
        left, right = session.branch("left"), session.branch("right", before=1)
        async with left, right:
            left.append([9, 9, 9])
            right.append([8] * 40)
            sampled = await asyncio.gather(
                left.sample(GREEDY, **OPTIONS), right.sample(GREEDY, **OPTIONS)
            )
            assert {rollout.worker for rollout in sampled} == {session.worker}
            assert steps.finds(sampled[0], len(trunk) - 4)
            assert steps.finds(sampled[1], 70)
            assert session.transcript.tokens.tolist() == trunk.tolist()
            assert await steps.is_as_fresh(left)
            assert await steps.is_as_fresh(right)


async def a_replaced_turn_finds_what_was_before_it(steps: Steps) -> None:
    async with steps.session("replace", 70) as session:
        session.append([40, 41, 42])
        await session.sample(GREEDY, **OPTIONS)
        other = SamplingParams(
            max_new_tokens=12, temperature=1.0, sampling_seed=None, ignore_eos=True
        )
        rollout = await session.replace(1, other, **OPTIONS)
        assert steps.finds(rollout, 69)
        assert [turn.is_sampled for turn in session.transcript.turns] == [False, True]
        await session.replace(-1, GREEDY, **OPTIONS)
        assert await steps.is_as_fresh(session)
        session.rewind(-1)
        session.append([5, 6, 7])
        assert steps.finds(await session.sample(GREEDY, **OPTIONS), 0)
        assert await steps.is_as_fresh(session)


async def streamed_turns_are_turns(steps: Steps) -> None:
    async with steps.session("stream", 70) as session:
        session.append([40, 41, 42])
        tokens: list[int] = []
        async for delta in session.sample_stream(GREEDY, **OPTIONS):
            tokens[delta.start :] = delta.tokens.tolist()
        assert session.transcript.turns[-1].tokens.tolist() == tokens
        assert len(tokens) == GREEDY.max_new_tokens
        is_whole = False
        async with aclosing(session.sample_stream(LONG, **OPTIONS)) as deltas:
            async for delta in deltas:
                is_whole = delta.rollout is not None  # a busy client finds all tokens in one delta
                break
        assert len(session.transcript.turns) == 4 + is_whole, "a turn that was left early is none"
        session.rewind(4)
        session.append([1, 2])
        rollout = await session.sample(GREEDY, **OPTIONS)
        assert steps.finds(rollout, 70 + 12 + 3 + 11)
        assert await steps.is_as_fresh(session)
