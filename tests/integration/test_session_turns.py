"""Turns of a session on the transformers engine: appended, branched from, replaced, streamed."""

import asyncio

import pytest

from rolloutbus import Fleet, RolloutClient, SamplingParams, connect_sync
from rolloutbus.errors import Refused
from rolloutbus.launcher.settings import UpOptions
from tests.integration import session_steps
from tests.integration.session_steps import GREEDY, Steps

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 16
FLEET: UpOptions = {
    "workers": 1,
    "engine_options": {"threads": 1, "slots": 8, "block_size": BLOCK},
    "store": False,
}


@pytest.fixture
def steps(client: RolloutClient) -> Steps:
    return Steps(client, BLOCK)


@pytest.mark.shows("generate_with_session", "cached_tokens")
async def test_appended_turns_find_the_turns_before_them_in_the_cache(steps: Steps) -> None:
    await session_steps.appended_turns_find_the_turns_before_them(steps)


@pytest.mark.shows("session_params.offset")
async def test_branches_find_what_they_share_in_the_cache(steps: Steps) -> None:
    await session_steps.branches_find_what_they_share(steps)


@pytest.mark.shows("session_params.replace")
async def test_a_replaced_turn_finds_what_was_before_it_in_the_cache(steps: Steps) -> None:
    await session_steps.a_replaced_turn_finds_what_was_before_it(steps)


@pytest.mark.shows("session streams")
async def test_streamed_turns_are_turns_like_others(steps: Steps) -> None:
    await session_steps.streamed_turns_are_turns(steps)


async def test_one_turn_is_sampled_at_a_time(steps: Steps) -> None:
    async with steps.session("busy", 8) as session:
        await steps.client.pause()
        turn = asyncio.create_task(session.sample(GREEDY))
        await asyncio.sleep(0)  # it begins
        for step in (lambda: session.append([1]), lambda: session.rewind(0)):
            with pytest.raises(Refused) as caught:
                step()
            assert caught.value.field == "session"
        await steps.client.resume()
        await turn
        session.append([1])


async def test_a_stream_that_others_overtook_adds_no_turn(steps: Steps) -> None:
    async with steps.session("overtaken", 8) as session:
        stream = session.sample_stream(GREEDY)
        await steps.client.pause()
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # it begins
        session.append([1])
        await steps.client.resume()
        deltas = [await first, *[delta async for delta in stream]]
        assert deltas[-1].finish_reason == "length"
        assert [turn.is_sampled for turn in session.transcript.turns] == [False, True, False]


async def test_a_turn_that_fails_leaves_the_transcript_as_it_was(steps: Steps) -> None:
    async with steps.session("fails", 8) as session:
        before = session.transcript.tokens.tolist()
        with pytest.raises(Refused):
            await session.replace(1, SamplingParams(top_p=0.0))
        with pytest.raises(Refused) as caught:
            await session.replace(3, GREEDY)
        assert caught.value.field == "turn"
        assert session.transcript.tokens.tolist() == before


@pytest.mark.shows("open_session", "close_session")
async def test_a_session_can_be_opened_and_closed_by_hand(client: RolloutClient) -> None:
    session = await client.session("by-hand").open()
    assert "by-hand" in client.sessions
    session.close()
    session = await client.session("by-hand").open()  # its place was free again
    session.close()


async def test_a_closed_session_takes_no_more_turns(client: RolloutClient) -> None:
    async with client.session("closed") as session:
        session.append([5, 6])
    for step in (lambda: session.append([1]), lambda: session.rewind(0)):
        with pytest.raises(Refused, match="'closed' is closed: branch from it") as caught:
            step()
        assert caught.value.field == "session"
    assert session.transcript.tokens.tolist() == [5, 6]


async def test_a_session_is_not_opened_twice_in_one_client(client: RolloutClient) -> None:
    async with client.session("twice") as session:
        second = client.session("twice")
        with pytest.raises(Refused, match="'twice' is open in this client already") as caught:
            await second.open()
        assert caught.value.code == "session_taken"
        second.close()
        await session.renew()
        assert session.worker
    async with client.session("twice"):
        """It is free again."""


async def test_a_turn_without_a_prompt_says_what_to_do(client: RolloutClient) -> None:
    async with client.session("bare") as session:
        with pytest.raises(Refused, match="`append` its prompt first"):
            await session.sample(GREEDY)
        with pytest.raises(Refused, match="`append` its prompt first"):
            await anext(session.sample_stream(GREEDY))


def _blocking_turns(address: str) -> list[int]:
    with connect_sync(address, name="plain") as plain, plain.session("plain") as session:
        session.append([5, 6, 7, 8])
        session.sample(GREEDY)
        session.append([9])
        streamed = [t for delta in session.sample_stream(GREEDY) for t in delta.tokens.tolist()]
        with session.branch("plain-branch", before=-1) as branch:
            assert branch.sample(GREEDY).tokens.tolist() == streamed
            assert branch.replace(-1, GREEDY).tokens.tolist() == streamed
            branch.rewind(1)
            assert len(branch.transcript) == 4
        return session.transcript.loss_mask.tolist()


async def test_the_blocking_session_takes_the_same_steps(fleet: Fleet) -> None:
    mask = await asyncio.to_thread(_blocking_turns, fleet.address)
    assert mask == [0] * 4 + [1] * 12 + [0] + [1] * 12
