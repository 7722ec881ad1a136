"""Agents of sixteen turns with a tool: what was sampled is never tokenised again, by any way.

A real model babbles letters and calls of a tool, hardly ever in the tokens that its tokenizer would
make of them. The witness is a recording of what the router heard: each turn's prompt, and what was
sampled.
"""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from rolloutbus import Fleet, OfflineRollouts, OpenAIClient, RolloutClient, SamplingParams
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import OfflineRollout, Transcript
from tests.chat_templates import PAIRS, TEMPLATES, tokenizer_of
from tests.integration.gateway_process import gateway
from tests.integration.live_fleet import DEADLINE_S, recorded
from tests.integration.reciting_model import model_of_successors

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 8},
    "store": False,
    "tap": True,
}
N_TURNS, N_AGENTS = 16, 3
N_TOKENS = 14
SAID = "abnok 12"
"""Characters of what the tool and the user say."""
N_FRAMES = 4
"""What a template writes between answers: around a tool's result or a user's words, after an answer
that the model ended or one that was cut off."""
CALL = ["<tool_call>", '{"name": "look", "arguments": {"at": "', '"}}', "</tool_call>"]
"""Tokens of their own, between which the model says a number."""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look"}}]
SIZE = 512

Json = dict[str, Any]
Turn = Callable[[list[Json], int], Awaitable[Json]]
"""(messages, a seed) -> the response."""


def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """One for each template; all have the same tokens."""
    return {name: tokenizer_of(*template, words=CALL) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says letters, a call or an end by chance; in a call, digits or the call's end."""
    path = tmp_path_factory.mktemp("babbling")
    tokenizer = tokenizers()["qwen"]
    tokenizer.save_pretrained(path)
    ids: dict[str, int] = tokenizer.get_vocab()
    letters = [ids[each] for each in ("a", "b", "n", "o", "k", *PAIRS) if not each.isdigit()]
    digits = [ids[each] for each in ("1", "2", "12", "21")]
    begin, opened, closed, end = (ids[each] for each in CALL)
    ends = sorted({ids[end] for _, end in TEMPLATES.values()})
    following = {each: [begin, *letters[:3]] for each in range(SIZE)}
    following |= {each: [*letters, begin, *ends] for each in letters}
    following |= {each: [*digits, closed] for each in digits}
    following |= {begin: [opened], opened: digits, closed: [end], end: ends}
    model_of_successors(following, SIZE, ends).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def user(fleet: Fleet, tiny_model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    more = ["--tool-format", "hermes", "--served-model-name", "babbling"]
    async with (
        gateway(*arguments, *more) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


async def converse(turn: Turn, rng: Random, *, tells_tokens: bool = False) -> list[Json]:
    """One trajectory; its responses."""
    messages: list[Json] = [{"role": "user", "content": "banana"}]
    responses: list[Json] = []
    for number in range(N_TURNS):
        response = await turn(messages, rng.getrandbits(30))
        responses.append(response)
        choice = response["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        messages.append(message | ({"token_ids": choice["token_ids"]} if tells_tokens else {}))
        content = f"{''.join(rng.choices(SAID, k=rng.randint(1, 9)))} result {number}."
        calls: list[Json] = message.get("tool_calls") or []
        if calls:
            told = {"role": "tool", "tool_call_id": calls[0]["id"], "content": content}
        else:
            told = {"role": "user", "content": content}
        messages.append(told)
    return responses


def body_of(messages: Sequence[Json], seed: int) -> Json:
    drawn = {"max_tokens": N_TOKENS, "temperature": 1.0, "seed": seed}
    return {"model": "babbling", "messages": messages, "tools": TOOLS, **drawn}


async def chat(
    client: OpenAIClient, name: str, more: Json, messages: list[Json], seed: int
) -> Json:
    """A turn by `OpenAIClient`, every other one streamed."""
    more = {"return_token_ids": True, "timeout": DEADLINE_S, **more}
    body = {**body_of(messages, seed), **more}
    if seed % 2:
        return await client.chat_completion(body, group=name)
    return whole([piece async for piece in client.chat_completion_stream(body, group=name)])


def whole(pieces: list[Json]) -> Json:
    """The response that these are pieces of, as far as an agent reads it."""
    deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    content = "".join(delta.get("content") or "" for delta in deltas)
    message = {"role": "assistant", "content": content, "tool_calls": calls or None}
    choice = {**pieces[-1]["choices"][0], "message": message}
    return {**pieces[-1], "choices": [choice]}


async def over_http(user: openai.AsyncOpenAI, name: str, messages: list[Json], seed: int) -> Json:
    """A turn by the `openai` package."""
    create: Any = user.chat.completions.create
    more = {"session_id": name, "return_token_ids": True}
    return (await create(**body_of(messages, seed), extra_body=more)).model_dump()


async def play(
    client: RolloutClient, name: str, rng: Random, spoil: PreTrainedTokenizerFast | None = None
) -> Transcript:
    """One trajectory by `client.session`; `spoil` tokenises what was sampled again."""
    tokenizer = tokenizers()["qwen"]
    async with client.session(name, wait_s=DEADLINE_S) as session:
        for number in range(N_TURNS):
            session.append(tokenizer.encode(f"result {number} {rng.random()}\n"))
            sampling = SamplingParams(max_new_tokens=N_TOKENS, sampling_seed=rng.getrandbits(30))
            rollout = await session.sample(sampling, deadline_s=DEADLINE_S)
            if spoil is not None:
                session.rewind(-1)
                session.append(spoil.encode(spoil.decode(rollout.tokens)))
    return session.transcript


def turns_in(journal: Path, name: str) -> list[OfflineRollout]:
    """What the router heard of one trajectory."""
    found = [each for each in OfflineRollouts(journal) if name in (each.session, each.group)]
    return sorted(found, key=lambda each: len(each.prompt))


def broken(turns: Sequence[OfflineRollout]) -> list[int]:
    """Turns whose prompt does not begin with all tokens of the turn before."""
    ends = [[*turn.prompt, *turn.rollout.tokens] for turn in turns]
    return [
        number
        for number, (before, turn) in enumerate(zip(ends, turns[1:], strict=False), 1)
        if turn.prompt[: len(before)].tolist() != before
    ]


def mask_of(turns: Sequence[OfflineRollout]) -> list[int]:
    """1 for each sampled token of the last turn's prompt and answer, 0 for the others."""
    mask = [0] * (len(turns[-1].prompt) + len(turns[-1].rollout.tokens))
    for turn in turns:
        start, n = len(turn.prompt), len(turn.rollout.tokens)
        mask[start : start + n] = [1] * n
    return mask


def check(turns: Sequence[OfflineRollout], responses: Sequence[Json]) -> None:
    """The trajectory is exact, and what its client was told adds up to it."""
    tokenizer = tokenizers()["qwen"]
    assert len(turns) == len(responses) == N_TURNS
    assert broken(turns) == []
    seen: list[int] = []
    mask: list[int] = []
    frames: set[str] = set()
    for number, (turn, response) in enumerate(zip(turns, responses, strict=True)):
        told, [choice] = response["prompt_token_ids"], response["choices"]
        assert told == turn.prompt.tolist()
        assert choice["token_ids"] == turn.rollout.tokens.tolist()
        new = told[len(seen) :]
        if number:
            before, result, after = str(tokenizer.decode(new)).partition(f"result {number - 1}.")
            assert result
            frames.add(before.rstrip(SAID) + after)
        seen += [*new, *choice["token_ids"]]
        mask += [0] * len(new) + [1] * len(choice["token_ids"])
    assert mask == mask_of(turns)
    assert len(frames) <= N_FRAMES, "there is more between two answers than what was said"


def check_all(journal: Path, names: Sequence[str], found: Sequence[Sequence[Json]]) -> None:
    """`check` of each trajectory; text would have changed the tokens of one at least."""
    told = {name: turns_in(journal, name) for name in names}
    for name, responses in zip(names, found, strict=True):
        check(told[name], responses)
    assert any(was_changed_by_text(turns) for turns in told.values())


def was_changed_by_text(turns: Sequence[OfflineRollout]) -> bool:
    """Whether the tokenizer would have made other tokens of what was sampled.

    One trajectory in 10,000 is the same by chance, so several have to be judged together.
    """
    tokenizer = tokenizers()["qwen"]
    texts = [str(tokenizer.decode(each.rollout.tokens)) for each in turns]
    return any(
        tokenizer.encode(text, add_special_tokens=False) != each.rollout.tokens.tolist()
        for text, each in zip(texts, turns, strict=True)
    )


@pytest.mark.shows("session_id")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("way", ["session", "token_ids"])
async def test_chats_go_on_token_by_token(
    fleet: Fleet, client: RolloutClient, template: str, way: str, seed: int, tmp_path: Path
) -> None:
    chats = OpenAIClient(client, tokenizers()[template], tool_format="hermes")
    is_told = way == "token_ids"
    names = [f"{template}-{way}-{number}" for number in range(N_AGENTS)]
    async with recorded(fleet, tmp_path / "journal"):
        agents = [
            converse(
                partial(chat, chats, name, {} if is_told else {"session_id": name}),
                Random(f"{seed}-{name}"),
                tells_tokens=is_told,
            )
            for name in names
        ]
        found = await asyncio.gather(*agents)
    check_all(tmp_path / "journal", names, found)
    reasons = [each["choices"][0]["finish_reason"] for responses in found for each in responses]
    assert {"stop", "tool_calls"} <= set(reasons)


async def test_chats_over_http_go_on_token_by_token(
    fleet: Fleet, user: openai.AsyncOpenAI, seed: int, tmp_path: Path
) -> None:
    names = [f"http-{number}" for number in range(N_AGENTS)]
    async with recorded(fleet, tmp_path / "journal"):
        agents = [
            converse(partial(over_http, user, name), Random(f"{seed}-{name}")) for name in names
        ]
        found = await asyncio.gather(*agents)
    check_all(tmp_path / "journal", names, found)


async def test_sessions_go_on_token_by_token_and_their_masks_mark_what_was_sampled(
    fleet: Fleet, client: RolloutClient, seed: int, tmp_path: Path
) -> None:
    names = [f"session-{number}" for number in range(N_AGENTS)]
    async with recorded(fleet, tmp_path / "journal"):
        found = await asyncio.gather(
            *(play(client, name, Random(f"{seed}-{name}")) for name in names)
        )
    for name, transcript in zip(names, found, strict=True):
        turns = turns_in(tmp_path / "journal", name)
        assert len(turns) == N_TURNS
        assert broken(turns) == []
        last = turns[-1]
        assert transcript.tokens.tolist() == [*last.prompt, *last.rollout.tokens]
        assert transcript.loss_mask.tolist() == mask_of(turns)
        is_mine = transcript.loss_mask.astype(bool)
        sampled = [each.rollout for each in turns]
        for column, told in (
            (transcript.tokens, [each.tokens for each in sampled]),
            (transcript.logprobs, [each.logprobs for each in sampled]),
            (transcript.token_versions, [each.token_versions for each in sampled]),
        ):
            assert np.array_equal(column[is_mine], np.concatenate(told))
    assert any(was_changed_by_text(turns_in(tmp_path / "journal", name)) for name in names)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_these_tests_notice_text_that_is_tokenised_again(
    fleet: Fleet, client: RolloutClient, template: str, seed: int, tmp_path: Path
) -> None:
    tokenizer = tokenizers()[template]
    chats = OpenAIClient(client, tokenizer, tool_format="hermes")
    texts = [f"as-text-{number}" for number in range(N_AGENTS)]
    sessions = [f"spoilt-{number}" for number in range(N_AGENTS)]
    async with recorded(fleet, tmp_path / "journal"):
        await asyncio.gather(
            *(converse(partial(chat, chats, each, {}), Random(f"{seed}-{each}")) for each in texts)
        )
        transcripts = await asyncio.gather(
            *(play(client, each, Random(f"{seed}-{each}"), spoil=tokenizer) for each in sessions)
        )
    assert any(broken(turns_in(tmp_path / "journal", each)) for each in texts)
    spoilt = [turns_in(tmp_path / "journal", each) for each in sessions]
    assert any(broken(turns) for turns in spoilt)
    masks = zip(transcripts, spoilt, strict=True)
    assert any(each.loss_mask.tolist() != mask_of(turns) for each, turns in masks)
