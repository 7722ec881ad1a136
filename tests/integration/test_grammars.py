"""Grammars on a fleet of the transformers engine: forced calls, forms of answers, a lost worker."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from rolloutbus import Fleet, Grammar, RolloutClient, SamplingParams, TextClient
from rolloutbus.errors import EngineFailed
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S, Streamed
from tests.sglang.models import byte_tokenizer, save_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 16, "max_context": 4096},
    "store": False,
}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {**form, "additionalProperties": False}},
    }
    for name, form in (("weather", UNIT), ("stop", {"type": "object"}))
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SAYS: list[Any] = [{"role": "user", "content": "hi"}]
ANSWERS: dict[str, Any] = {"model": "tiny", "messages": SAYS, "max_tokens": 2000}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes: what has a form in its answers has it by a grammar."""
    path = save_model("llama", tmp_path_factory.mktemp("bytes"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    more = ["--served-model-name", "tiny", "--tool-format", "hermes"]
    async with gateway(*arguments, *more) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def user(served: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def assert_call(name: str, arguments: str) -> None:
    told = json.loads(arguments)
    assert told in {"weather": [{"unit": "C"}, {"unit": "F"}], "stop": [{}]}[name]


@pytest.mark.shows("tool_choice")
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_is_forced_whole_and_in_a_stream(
    user: openai.AsyncOpenAI, choice: object
) -> None:
    asked: Any = {**ANSWERS, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    create: Any = user.chat.completions.create
    whole = await create(**asked, n=3)
    for answer in whole.choices:
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        [call] = answer.message.tool_calls
        assert_call(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "weather"

    chunks = await create(**asked, stream=True)
    deltas: list[Any] = [choice async for chunk in chunks for choice in chunk.choices]
    calls: list[Any] = [call for each in deltas for call in each.delta.tool_calls or ()]
    [call] = calls
    assert_call(call.function.name, call.function.arguments)
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.shows("response_format")
async def test_an_answer_has_the_form_that_was_asked_for(user: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
    create: Any = user.chat.completions.create
    answer = await create(**ANSWERS, response_format=form, seed=3)
    content: str = answer.choices[0].message.content
    assert json.loads(content) in [{"ok": True}, {"ok": False}]
    anything: Any = {"type": "json_object"}
    answer = await create(**ANSWERS, response_format=anything, seed=3)
    content = answer.choices[0].message.content
    assert content.startswith("{"), "a random model may never close it"


async def test_a_schema_that_is_none_is_named_as_the_body_names_it(
    user: openai.AsyncOpenAI,
) -> None:
    schema = {"type": "objekt"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match='Unsupported type "objekt"') as refused:
        await user.chat.completions.create(**ANSWERS, response_format=form)
    assert (refused.value.param, refused.value.code) == ("response_format", "bad_request")


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("json_schema", json.dumps({"enum": ["left", "right"]}), '"(left|right)"'),
        ("regex", "[ab]{4}", "[ab]{4}"),
        ("ebnf", 'root ::= "yes" | "no"', "yes|no"),
    ],
)
async def test_sglangs_endpoint_takes_grammars(
    served: Gateway, kind: str, text: str, pattern: str
) -> None:
    sampling = {"max_new_tokens": 40, kind: text}
    reply = await served.ask("POST", "/generate", {"text": "hi", "sampling_params": sampling})
    assert reply.status == 200, reply.body
    assert re.fullmatch(pattern, reply.json["text"])


async def test_bytes_of_tokens_join_to_the_characters_that_they_are_parts_of(
    user: openai.AsyncOpenAI,
) -> None:
    create: Any = user.chat.completions.create
    asked = {**ANSWERS, "logprobs": True, "top_logprobs": 1, "extra_body": {"regex": "日本é"}}
    whole = await create(**asked)
    chunks = [chunk async for chunk in await create(**asked, stream=True)]
    for choice in (whole.choices[0], chunks[-1].choices[0]):
        told: list[Any] = choice.logprobs.content[: len("日本é".encode())]
        assert b"".join(bytes(each.bytes) for each in told).decode() == "日本é"
        assert [each.top_logprobs[0].bytes for each in told] == [each.bytes for each in told]


@pytest.mark.shows("no_stop_trim")
@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_text_ends_before_its_stop_text_unless_that_is_to_be_kept(
    served: Gateway, client: RolloutClient, is_kept: bool
) -> None:
    pattern = {"regex": "[ab]{2}<end>[ab]{9}"}
    params = {"max_new_tokens": 40, "stop": ["<end>"], "no_stop_trim": is_kept}
    said = "[ab]{2}" + "<end>" * is_kept

    asked = {"text": "hi", "sampling_params": {**params, **pattern}}
    reply = await served.ask("POST", "/generate", asked)
    assert re.fullmatch(said, reply.json["text"])
    assert len(reply.json["output_ids"]) == 7, "tokens hold it always"

    chat = {**ANSWERS, **pattern, "stop": "<end>", "no_stop_trim": is_kept}
    reply = await served.ask("POST", "/v1/chat/completions", chat)
    assert re.fullmatch(said, reply.json["choices"][0]["message"]["content"])

    grammar = Grammar("regex", pattern["regex"])
    texts = TextClient(client, byte_tokenizer())
    whole = await texts.generate("hi", params, grammar=grammar, deadline_s=DEADLINE_S)
    assert re.fullmatch(said, whole.text)
    stream = texts.stream("hi", params, grammar=grammar, deadline_s=DEADLINE_S)
    assert re.fullmatch(said, "".join([piece async for piece in stream]))


@pytest.mark.shows("min_new_tokens")
async def test_a_stop_text_within_the_least_number_of_tokens_stays_in_the_text(
    served: Gateway, user: openai.AsyncOpenAI, client: RolloutClient
) -> None:
    pattern, said, n_tokens, least = "a<end>b<end>[ab]{9}", "a<end>b", len("a<end>b<end>"), 6
    params = {"max_new_tokens": 40, "min_new_tokens": least, "stop": ["<end>"]}

    asked = {"text": "hi", "sampling_params": {**params, "regex": pattern}}
    reply = await served.ask("POST", "/generate", asked)
    assert (reply.json["text"], len(reply.json["output_ids"])) == (said, n_tokens)

    streamed = await served.ask("POST", "/generate", asked | {"stream": True})
    assert all(said.startswith(event["text"]) for event in streamed.events)
    assert streamed.events[-1]["text"] == said

    extra = {"regex": pattern, "min_tokens": least}
    chat = await user.chat.completions.create(
        **ANSWERS, stream=False, stop="<end>", extra_body=extra
    )
    assert chat.choices[0].message.content == said
    chunks = await user.chat.completions.create(
        **ANSWERS, stop="<end>", extra_body=extra, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(pieces) == said
    prompt: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 40}
    completion = await user.completions.create(
        **prompt, stream=False, stop="<end>", extra_body=extra
    )
    assert completion.choices[0].text == said
    stream = await user.completions.create(**prompt, stop="<end>", extra_body=extra, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == said

    options: Any = {"grammar": Grammar("regex", pattern), "deadline_s": DEADLINE_S}
    texts = TextClient(client, byte_tokenizer())
    whole = await texts.generate("hi", params, **options)
    assert (whole.text, len(whole.rollout.tokens)) == (said, n_tokens)
    assert "".join([piece async for piece in texts.stream("hi", params, **options)]) == said


async def test_a_prefix_goes_on_in_its_grammar_when_its_worker_is_killed(
    client: RolloutClient, fleet: Fleet
) -> None:
    grammar = Grammar("regex", "([ab]{5}c){500}")
    sampling = SamplingParams(
        max_new_tokens=3500, sampling_seed=5, frequency_penalty=0.001, stop=["never"]
    )
    options: Any = {"grammar": grammar, "deadline_s": 2 * DEADLINE_S}
    alone = await client.generate([70, 71], sampling, **options)
    interrupted = Streamed(client, [70, 71], sampling, **options)
    await interrupted.reached(100)
    fleet.kill(interrupted.worker)
    rollout = await interrupted.rollout(2 * DEADLINE_S)
    assert rollout.n_resumed > 0
    assert rollout.tokens.tolist() == alone.tokens.tolist()
    text = byte_tokenizer().decode(rollout.tokens[:-1].tolist())
    assert re.fullmatch(grammar.text, str(text))


async def test_a_pattern_that_is_none_is_refused_and_the_fleet_goes_on(
    client: RolloutClient,
) -> None:
    with pytest.raises(EngineFailed, match="not closed") as caught:
        await client.generate([70], SamplingParams(), grammar=Grammar("regex", "(("))
    problem = caught.value.problem
    assert (problem.code, problem.field) == ("bad_request", "grammar.text")
    assert caught.value.outcome == "not_started"
    groups = await client.generate_batch(
        [[70], [71]], SamplingParams(), n=3, grammar=Grammar("regex", "[0-9]{3}")
    )
    texts = [
        byte_tokenizer().decode(each.tokens[:-1].tolist()) for group in groups for each in group
    ]
    assert all(re.fullmatch("[0-9]{3}", str(text)) for text in texts)
    assert len(set(texts)) > 1, "samples of a prompt are not the same"
