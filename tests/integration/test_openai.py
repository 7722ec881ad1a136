"""OpenAI's bodies answered by a real model through the bus: chats, tool calls, completions."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rolloutbus import (
    Fleet,
    OpenAIClient,
    RolloutClient,
    SamplingParams,
    SyncOpenAIClient,
    connect_sync,
)
from rolloutbus.errors import EngineFailed, Refused, SettingsError
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import DEADLINE_S, status_when
from tests.integration.reciting_model import LINES, UNDER_WAY, save_reciting_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine_options": {"threads": 1, "slots": 8}, "store": False}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather"}}]
GREEDY = {"temperature": 0, "timeout": DEADLINE_S, "model": "tiny"}


@pytest.fixture(scope="session")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedTokenizerFast]:
    path = tmp_path_factory.mktemp("reciting")
    return path, save_reciting_model(path)


@pytest.fixture(scope="session")
def tiny_model(reciting: tuple[Path, PreTrainedTokenizerFast]) -> Path:
    """What the fleet of this module runs."""
    return reciting[0]


@pytest.fixture
def openai(client: RolloutClient, reciting: tuple[Path, PreTrainedTokenizerFast]) -> OpenAIClient:
    return OpenAIClient(client, reciting[1], tool_format="hermes")


def chat(cue: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a body
    return {"messages": [{"role": "user", "content": f"please {cue}"}], **GREEDY, **more}


@pytest.mark.shows("chat_completion", "n")
async def test_a_chat_is_answered_in_openais_form(openai: OpenAIClient) -> None:
    response = await openai.chat_completion(chat("hello", n=2))

    assert response["object"] == "chat.completion"
    assert response["id"].startswith("chatcmpl-")
    assert response["model"] == "tiny"
    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    for choice in response["choices"]:
        assert choice["message"] == {"role": "assistant", "content": LINES["hello"]}
        assert choice["finish_reason"] == "stop"
        assert choice["weight_versions"] == [[0, 5]]
    assert response["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}


@pytest.mark.shows("tools")
async def test_a_tool_call_is_read_from_what_the_model_says(openai: OpenAIClient) -> None:
    response = await openai.chat_completion(chat("weather", tools=TOOLS))

    [choice] = response["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see"
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


async def test_without_tools_a_call_is_text(openai: OpenAIClient) -> None:
    mores: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for more in mores:
        response = await openai.chat_completion(chat("weather", **more))
        [choice] = response["choices"]
        assert choice["message"] == {"role": "assistant", "content": LINES["weather"]}
        assert choice["finish_reason"] == "stop"


async def test_a_broken_call_is_text_and_no_error(openai: OpenAIClient) -> None:
    response = await openai.chat_completion(chat("broken", tools=TOOLS))
    [choice] = response["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert '{"name":"oops",' in choice["message"]["content"]


@pytest.mark.shows("stream")
async def test_the_stream_of_a_chat_says_what_the_whole_answer_says(
    openai: OpenAIClient,
) -> None:
    body = chat("weather", tools=TOOLS, n=2, return_token_ids=True)
    whole = await openai.chat_completion(body)
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    chunks = [chunk async for chunk in openai.chat_completion_stream(body)]

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, expected in enumerate(whole["choices"]):
        mine = [choice for choice in told if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        content = "".join(choice["delta"].get("content", "") for choice in mine)
        assert content.strip() == expected["message"]["content"]
        [call] = [each for choice in mine for each in choice["delta"].get("tool_calls", ())]
        assert call["index"] == 0
        assert call["function"] == expected["message"]["tool_calls"][0]["function"]
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "tool_calls"
        assert mine[-1]["token_ids"] == expected["token_ids"]


async def test_to_leave_a_stream_ends_its_requests(
    openai: OpenAIClient, client: RolloutClient
) -> None:
    body = chat("hello", ignore_eos=True, max_tokens=UNDER_WAY, n=2)
    chunks = openai.chat_completion_stream(body)
    content = ""
    while not content:
        content = (await anext(chunks))["choices"][0]["delta"]["content"]
    await chunks.aclose()
    assert LINES["hello"].startswith(content)
    await status_when(client, lambda status: status.n_running + status.n_queued == 0)


async def test_what_is_aborted_answers_what_it_has(
    openai: OpenAIClient,
    client: RolloutClient,
    reciting: tuple[Path, PreTrainedTokenizerFast],
) -> None:
    body = chat("hello", ignore_eos=True, max_tokens=UNDER_WAY, n=2, return_token_ids=True)
    whole = asyncio.create_task(openai.chat_completion(body))
    chunks = openai.chat_completion_stream(body)
    told: list[dict[str, Any]] = []
    while not any(choice["delta"].get("content") for choice in told):
        told += (await anext(chunks))["choices"]
    await status_when(client, lambda status: status.n_running == 4)
    await client.abort()
    told += [choice for chunk in [each async for each in chunks] for choice in chunk["choices"]]

    for choice in (await whole)["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) == sum(n for _, n in choice["weight_versions"])
    for index in range(2):
        mine = [choice for choice in told if choice["index"] == index]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["abort"]
        text = "".join(each["delta"].get("content", "") for each in mine)
        held = reciting[1].decode(mine[-1]["token_ids"], skip_special_tokens=True)
        assert text == held


async def test_token_ids_and_logprobs_are_those_of_the_rollout(
    openai: OpenAIClient, client: RolloutClient
) -> None:
    body = chat("hello", logprobs=True, top_logprobs=2, return_token_ids=True)
    response = await openai.chat_completion(body)
    [choice] = response["choices"]
    prompt = response["prompt_token_ids"]
    plain = await client.generate(prompt, SamplingParams(max_new_tokens=9, temperature=0.0))

    assert choice["token_ids"] == plain.tokens.tolist()
    told = choice["logprobs"]["content"]
    assert [each["logprob"] for each in told] == pytest.approx(plain.logprobs.tolist())
    assert [each["token"] for each in told] == [*LINES["hello"].split(), "</s>"]
    assert [each["top_logprobs"][0]["token"] for each in told] == [each["token"] for each in told]
    assert {len(each["top_logprobs"]) for each in told} == {2}
    assert bytes(told[0]["bytes"]).decode() == told[0]["token"]


async def test_an_answer_ends_before_its_stop_text(openai: OpenAIClient) -> None:
    body = chat("hello", stop=["to", "never"])
    response = await openai.chat_completion(body)
    chunks = [chunk async for chunk in openai.chat_completion_stream(body)]

    [choice] = response["choices"]
    assert choice["message"]["content"] == "Good day "
    assert choice["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == 3
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == "Good day "


@pytest.mark.shows("max_tokens", "max_completion_tokens", "completion")
async def test_prompts_of_a_completion_may_be_texts_or_tokens(
    openai: OpenAIClient, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    ids = reciting[1].encode("hello")
    for prompt in ("hello", ["hello"], ids, [ids]):
        response = await openai.completion({"prompt": prompt, **GREEDY})
        assert response["object"] == "text_completion"
        assert [choice["text"] for choice in response["choices"]] == [LINES["hello"]]
    several = {"prompt": ["hello", "weather"], "n": 2, "echo": True, "max_tokens": 3, **GREEDY}
    response = await openai.completion(several)
    texts = [choice["text"] for choice in response["choices"]]
    assert texts == 2 * ["helloGood day to"] + 2 * ["weatherLet me see"]
    assert {choice["finish_reason"] for choice in response["choices"]} == {"length"}
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


async def test_a_completion_tells_logprobs_in_columns_also_in_a_stream(
    openai: OpenAIClient,
) -> None:
    body = {"prompt": "hello", "logprobs": 1, **GREEDY}
    [choice] = (await openai.completion(body))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*LINES["hello"].split(), "</s>"]
    assert logprobs["text_offset"] == [0, 4, 7, 9, 12]
    assert [len(each) for each in logprobs["top_logprobs"]] == [1] * 5

    chunks = [chunk["choices"][0] async for chunk in openai.completion_stream(body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["logprobs"] == logprobs


@pytest.mark.shows("request_payload", "session_id")
async def test_requests_of_a_session_go_where_it_is(
    openai: OpenAIClient, client: RolloutClient
) -> None:
    async with client.session("chat") as session:
        for _ in range(3):
            payload = {"json": chat("hello", session_id="chat"), "headers": {"x": "y"}}
            response = await openai.chat_completion(payload)
            assert response["choices"][0]["worker"] == session.worker


WRONG_FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"response_format": WRONG_FORM}, "response_format"),
        ({"regex": "(("}, "regex"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"lora_path": "nobody"}, "lora_path"),
        ({"versions": "newest"}, "versions"),
        ({"timeout": 0}, "timeout"),
        ({"stream": True}, "stream"),
        ({"top_logprobs": 100_000, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_done_names_the_field_of_the_body(
    openai: OpenAIClient, more: dict[str, Any], field: str
) -> None:
    with pytest.raises((Refused, EngineFailed)) as caught:
        await openai.chat_completion(chat("hello", **more))
    assert caught.value.field == field
    assert field.rpartition(".")[2] in str(caught.value)


async def test_calls_of_a_format_that_nothing_tells_stay_in_the_content(
    client: RolloutClient, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    for unread in (
        OpenAIClient(client, reciting[1]),
        OpenAIClient(client, reciting[1], tool_format="none"),
    ):
        response = await unread.chat_completion(chat("weather", tools=TOOLS))
        assert response["choices"][0]["message"]["content"] == LINES["weather"]
    with pytest.raises(SettingsError, match="hermes"):
        OpenAIClient(client, reciting[1], tool_format="unheard-of")


async def test_the_blocking_client_answers_the_same(
    fleet: Fleet, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    body = chat("weather", tools=TOOLS)

    def blocking() -> tuple[str, list[str], str]:
        with connect_sync(fleet.address, name="plain") as plain:
            client = SyncOpenAIClient(plain, reciting[1], tool_format="hermes")
            [choice] = client.chat_completion(body)["choices"]
            told = [each["choices"][0] for each in client.chat_completion_stream(body)]
            hello = {"prompt": "hello", **GREEDY}
            texts = [each["text"] for each in client.completion(hello)["choices"]]
            streamed = client.completion_stream(hello)
            assert "".join(each["choices"][0]["text"] for each in streamed) == texts[0]
            return choice["finish_reason"], texts, told[-1]["finish_reason"]

    assert await asyncio.to_thread(blocking) == ("tool_calls", [LINES["hello"]], "tool_calls")
