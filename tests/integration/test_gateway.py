"""A gateway as its users have it: the `openai` package, and SGLang's endpoints over plain HTTP."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from rolloutbus import Fleet, RolloutClient, SamplingParams, up
from rolloutbus.errors import SettingsError
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S, another_worker, status_when
from tests.integration.reciting_model import LINES, UNDER_WAY, save_reciting_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine_options": {"threads": 1, "slots": 8}, "store": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather"}}]
LONG = {"max_new_tokens": UNDER_WAY, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="session")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedTokenizerFast]:
    path = tmp_path_factory.mktemp("reciting")
    return path, save_reciting_model(path)


@pytest.fixture(scope="session")
def tiny_model(reciting: tuple[Path, PreTrainedTokenizerFast]) -> Path:
    """What the fleet of this module runs."""
    return reciting[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    more = ["--served-model-name", "tiny", "--tool-format", "hermes"]
    more += ["--reasoning-format", "qwen3"]
    async with gateway(*arguments, *more) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def user(served: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def says(cue: str) -> list[Any]:
    return [{"role": "user", "content": f"please {cue}"}]


def ids_of(reciting: tuple[Path, PreTrainedTokenizerFast], text: str) -> list[int]:
    return [int(token) for token in reciting[1].encode(text, add_special_tokens=False)]


async def idle(client: RolloutClient) -> None:
    await status_when(client, lambda status: status.n_running + status.n_queued == 0)


async def busy(client: RolloutClient) -> None:
    await status_when(client, lambda status: status.n_running > 0)


@pytest.mark.shows("enable_http_endpoint")
async def test_openais_package_chats(user: openai.AsyncOpenAI) -> None:
    answer = await user.chat.completions.create(
        model="tiny", messages=says("hello"), temperature=0, n=2, logprobs=True, seed=3
    )
    assert [choice.message.content for choice in answer.choices] == [LINES["hello"]] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5


async def test_usage_tells_how_much_of_a_prompt_was_cached(user: openai.AsyncOpenAI) -> None:
    session = {"session_id": "tells-what-was-cached"}
    long = says("hello " * 64)
    chats = [
        await user.chat.completions.create(
            model="tiny", messages=long, max_tokens=3, extra_body=session
        )
        for _ in range(2)
    ]
    stream = await user.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=3,
        extra_body=session,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for told in (chats[-1], chunks[-1]):
        usage = told.model_dump()["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert chats[-1].model_dump()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_an_engine_that_cannot_tell_what_was_cached_serves_who_did_not_ask(
    fleet: Fleet, client: RolloutClient, served: Gateway
) -> None:
    completion = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    sampling = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
    asks = [("/v1/completions", completion), ("/generate", sampling)] * 8
    asks.append(("/v1/completions", {**completion, "stream": True}))
    first = await served.ask("POST", *asks[0])
    assert "prompt_tokens_details" in first.json["usage"]
    async with another_worker(fleet, client, "bare", engine="fake"):
        replies = await asyncio.gather(*(served.ask("POST", *each) for each in asks))
    assert [each.status for each in replies] == [200] * len(asks), replies


async def test_logprobs_may_tell_tokens_by_their_ids(
    user: openai.AsyncOpenAI, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    body = {"return_tokens_as_token_ids": True}
    chat = await user.chat.completions.create(
        model="tiny", messages=says("hello"), temperature=0, logprobs=True, extra_body=body
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    wanted = [f"token_id:{token}" for token in ids_of(reciting, f"{LINES['hello']} </s>")]
    assert [each.token for each in told.content] == wanted
    assert bytes(told.content[0].bytes or []).decode() == "Good"

    completion = await user.completions.create(
        model="tiny", prompt="hello", temperature=0, logprobs=0, extra_body=body
    )
    columns = completion.choices[0].logprobs
    assert columns is not None
    assert columns.tokens == wanted


async def test_openais_package_streams(user: openai.AsyncOpenAI) -> None:
    stream = await user.chat.completions.create(
        model="tiny",
        messages=says("hello"),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == LINES["hello"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_openais_package_gets_tool_calls(user: openai.AsyncOpenAI) -> None:
    answer = await user.chat.completions.create(
        model="tiny", messages=says("weather"), temperature=0, tools=TOOLS
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_openais_package_gets_reasoning_apart_from_content(
    user: openai.AsyncOpenAI,
) -> None:
    body: Any = {"model": "tiny", "messages": says("think"), "temperature": 0}
    create: Any = user.chat.completions.create
    answer = await create(**body)
    whole: dict[str, Any] = answer.choices[0].message.model_dump()
    assert (whole["reasoning_content"], whole["content"]) == ("is it so", "Yes indeed")
    stream = await create(**body, stream=True)
    deltas: list[dict[str, Any]] = [chunk.choices[0].delta.model_dump() async for chunk in stream]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == whole[field]


async def test_call_that_no_token_of_the_model_can_begin_is_refused_by_its_field(
    user: openai.AsyncOpenAI,
) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        with pytest.raises(openai.BadRequestError, match="no token of the model") as refused:
            await user.chat.completions.create(
                model="tiny", messages=says("weather"), tools=TOOLS, tool_choice=choice
            )
        assert (refused.value.param, refused.value.code) == ("tool_choice", "bad_request")
    answer = await user.chat.completions.create(
        model="tiny", messages=says("weather"), temperature=0, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.content == LINES["weather"]


async def test_no_second_call_comes_where_none_may(
    user: openai.AsyncOpenAI, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    answer = await user.chat.completions.create(
        model="tiny",
        messages=says("weather"),
        temperature=0,
        tools=TOOLS,
        parallel_tool_calls=False,
        extra_body={"return_token_ids": True},
    )
    [choice] = answer.model_dump()["choices"]
    assert choice["token_ids"][-1:] == ids_of(reciting, "</tool_call>"), "not the end of the turn"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


async def test_embeddings_are_refused_with_the_engine_that_has_them(
    user: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match="is_embedding"):
        await user.embeddings.create(model="tiny", input="hello")
    with pytest.raises(openai.BadRequestError) as wrong:
        await user.embeddings.create(model="tiny", input=[["hello"]])  # type: ignore[list-item] - the point
    assert wrong.value.param == "input"
    with pytest.raises(openai.BadRequestError) as versioned:
        await user.embeddings.create(model="tiny@0", input="hello")
    assert versioned.value.param == "model"


async def test_sampled_tokens_of_a_session_are_never_tokenised_again(
    user: openai.AsyncOpenAI, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    tokenizer = reciting[1]
    messages = says("weather")
    before: list[int] = []
    n_changed = 0
    for turn in range(10):
        wild = {"temperature": 40.0, "seed": turn, "max_tokens": 8}
        answer = await user.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            extra_body={
                **({"temperature": 0} if turn % 2 == 0 else wild),
                "session_id": "trajectory",
                "return_token_ids": True,
            },
        )
        told = answer.model_dump()
        [choice] = told["choices"]
        assert told["prompt_token_ids"][: len(before)] == before
        assert told["kept_prompt_tokens"] == len(before)
        before = told["prompt_token_ids"] + choice["token_ids"]
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        n_changed += ids_of(reciting, str(tokenizer.decode(before))) != before
        calls = answer.choices[0].message.tool_calls
        assert bool(calls) == (turn % 2 == 0)
        if calls:
            messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "Good day"})
        else:
            messages += says("weather")
    assert n_changed >= 8, "or else the tokenizer would have done"

    stream = await user.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=TOOLS,
        temperature=0,
        stream=True,
        extra_body={"session_id": "trajectory", "return_token_ids": True},
    )
    chunks = [chunk.model_dump() async for chunk in stream]
    assert chunks[-1]["prompt_token_ids"][: len(before)] == before
    before = chunks[-1]["prompt_token_ids"] + chunks[-1]["choices"][0]["token_ids"]
    content = "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks)
    [call] = [each for c in chunks for each in c["choices"][0]["delta"].get("tool_calls") or ()]
    messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
    answer = await user.chat.completions.create(
        model="tiny",
        messages=[*messages, *says("hello")],
        tools=TOOLS,
        temperature=0,
        extra_body={"session_id": "trajectory", "return_token_ids": True},
    )
    assert answer.model_dump()["prompt_token_ids"][: len(before)] == before
    assert answer.choices[0].message.content == LINES["hello"]


async def test_openais_package_completes_and_lists_models(user: openai.AsyncOpenAI) -> None:
    answer = await user.completions.create(model="tiny", prompt="hello", temperature=0)
    assert answer.choices[0].text.strip() == LINES["hello"]
    assert [model.id async for model in user.models.list()] == ["tiny"]
    assert (await user.models.retrieve("tiny")).owned_by == "rolloutbus"


async def test_blocking_package_is_answered_too(served: Gateway) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model="tiny", messages=says("hello"), temperature=0
            )
        return answer.choices[0].message.content

    assert await asyncio.to_thread(ask) == LINES["hello"]


async def test_errors_are_those_that_openais_package_knows(user: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'") as unknown:
        await user.chat.completions.create(model="tinny", messages=says("hello"))
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        await user.chat.completions.create(model="tiny", messages=says("hello"), top_p=7)
    assert (wrong.value.param, wrong.value.code) == ("top_p", "bad_request")
    with pytest.raises(openai.BadRequestError, match="`logprobs`: true") as untold:
        await user.chat.completions.create(model="tiny", messages=says("hello"), top_logprobs=2)
    assert (untold.value.param, untold.value.code) == ("top_logprobs", "bad_request")
    with pytest.raises(openai.BadRequestError) as misspelt:
        await user.chat.completions.create(
            model="tiny", messages=says("hello"), stream=True, extra_body={"temprature": 0}
        )
    assert misspelt.value.param == "temprature"
    assert "did you mean 'temperature'?" in misspelt.value.message
    with pytest.raises(openai.BadRequestError, match="temperature: Expected"):
        await user.completions.create(
            model="tiny", prompt="hello", extra_body={"temperature": "hot"}
        )
    with pytest.raises(openai.BadRequestError) as both:
        await user.chat.completions.create(
            model="tiny@0", messages=says("hello"), extra_body={"versions": "latest"}
        )
    assert both.value.param == "versions"


async def test_version_in_the_name_of_a_model_is_the_one_that_samples(
    user: openai.AsyncOpenAI,
) -> None:
    answer = await user.chat.completions.create(
        model="tiny@0", messages=says("hello"), temperature=0
    )
    assert answer.choices[0].message.content == LINES["hello"]
    with pytest.raises(openai.InternalServerError) as absent:
        await user.chat.completions.create(
            model="tiny@9", messages=says("hello"), extra_body={"timeout": 0.5}
        )
    assert absent.value.status_code in (503, 504)


async def test_generate_tells_what_the_bus_does(
    served: Gateway, client: RolloutClient, reciting: tuple[Path, PreTrainedTokenizerFast]
) -> None:
    prompt = ids_of(reciting, "please hello")
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    wanted = await client.generate(prompt, greedy)

    sampling = {"max_new_tokens": 8, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    body |= {"image_data": None, "logprob_start_len": -1, "return_routed_experts": False}
    told = (await served.ask("POST", "/generate", body)).json

    assert told["output_ids"] == wanted.tokens.tolist()
    assert told["text"] == LINES["hello"]
    meta = told["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == wanted.tokens.tolist()
    assert [value for value, _, _ in meta["output_token_logprobs"]] == pytest.approx(
        wanted.logprobs.tolist(), abs=1e-5
    )
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["prompt_tokens"], meta["weight_version"]) == (2, "0")


async def test_generate_takes_batches_and_texts(served: Gateway) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 0, "n": 2}
    body = {"text": ["please hello", "hello"], "sampling_params": sampling}
    replies = (await served.ask("POST", "/generate", body)).json
    assert [each["text"] for each in replies] == [LINES["hello"]] * 4


async def test_generate_streams_all_tokens_so_far(served: Gateway) -> None:
    body = {"text": "hello", "sampling_params": {"temperature": 0}, "stream": True}
    events = (await served.ask("POST", "/generate", body)).events
    texts = [event["text"] for event in events]
    assert texts[-1] == LINES["hello"]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop"}


async def test_request_is_aborted_by_name_and_tells_what_it_has(
    served: Gateway, client: RolloutClient
) -> None:
    body = {"text": "hello", "sampling_params": LONG, "rid": "mine"}
    asked = asyncio.create_task(served.ask("POST", "/generate", body))
    await busy(client)
    twice = await served.ask("POST", "/generate", body)
    assert (twice.status, twice.json["error"]["code"]) == (409, "duplicate_rid")
    aborted = await served.ask("POST", "/abort_request", {"rid": "mine"})
    assert aborted.json == {"aborted": 1}
    reply = (await asked).json
    assert reply["meta_info"]["finish_reason"] == {"type": "abort"}
    assert reply["meta_info"]["id"] == "mine"
    await idle(client)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_request_of_a_client_that_leaves_is_aborted(
    served: Gateway, client: RolloutClient, *, is_streamed: bool
) -> None:
    body = {"text": "hello", "sampling_params": LONG, "stream": is_streamed}
    reader, writer = await served.open("POST", "/generate", json.dumps(body).encode())
    await busy(client)
    if is_streamed:
        await reader.readuntil(b"data: ")
    writer.close()
    await idle(client)


async def test_paused_fleet_samples_nothing_until_it_goes_on(
    served: Gateway, client: RolloutClient
) -> None:
    paused = await served.ask("POST", "/pause_generation", {"mode": "in_place"})
    assert (paused.status, paused.json["status"]) == (200, "ok")
    body = {"text": "hello", "sampling_params": {"temperature": 0}}
    asked = asyncio.create_task(served.ask("POST", "/generate", body))
    await status_when(client, lambda status: status.n_queued == 1)
    assert not asked.done()
    for path in ("/health", "/health_generate"):
        assert (await served.ask("GET", path)).status == 503
    await served.ask("POST", "/continue_generation", {})
    assert (await asked).json["text"] == LINES["hello"]
    assert (await served.ask("GET", "/health")).status == 200


async def test_pause_that_aborts_ends_what_runs_here_with_what_it_has(
    served: Gateway, client: RolloutClient
) -> None:
    body = {"text": "hello", "sampling_params": LONG}
    asked = asyncio.create_task(served.ask("POST", "/generate", body))
    long = {"max_tokens": UNDER_WAY, "ignore_eos": True, "temperature": 0}
    chat = {"model": "tiny", "messages": says("hello"), "return_token_ids": True, **long}
    chatting = asyncio.create_task(served.ask("POST", "/v1/chat/completions", chat))
    await status_when(client, lambda status: status.n_running == 2)
    await served.ask("POST", "/pause_generation", {})
    assert (await asked).json["meta_info"]["finish_reason"] == {"type": "abort"}
    answered = await chatting
    assert answered.status == 200
    assert answered.json["choices"][0]["finish_reason"] == "abort"
    await served.ask("POST", "/continue_generation", {})
    await idle(client)


async def test_a_balancer_may_ask_for_the_head_of_health_alone(served: Gateway) -> None:
    reply = await served.ask("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


async def test_fleet_tells_of_itself(served: Gateway) -> None:
    assert (await served.ask("GET", "/health_generate")).status == 200
    info = (await served.ask("GET", "/server_info")).json
    assert set(info["workers"]) == {"w0", "w1"}
    assert (await served.ask("GET", "/model_info")).json["weight_version"] == "0"
    workers = (await served.ask("GET", "/list_workers")).json["workers"]
    assert {each["name"] for each in workers} == {"w0", "w1"}
    assert (await served.ask("POST", "/flush_cache")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/generate", b"{", 400, "body"),
        ("/generate", b"[1]", 400, "body"),
        ("/generate", b"[" * 100_000, 400, "body"),
        ("/generate", b"\xff\xfe", 400, "body"),
        ("/generate", b"{}", 400, "input_ids"),
        ("/generate", b'{"input_ids":[]}', 400, "input_ids"),
        ("/generate", b'{"input_ids":[1e300]}', 400, "input_ids[0]"),
        ("/generate", b'{"input_ids":[1],"sampling_param":{}}', 400, "sampling_param"),
        (
            "/generate",
            b'{"input_ids":[1],"sampling_params":{"temprature":1}}',
            400,
            "sampling_params.temprature",
        ),
        (
            "/generate",
            b'{"input_ids":[1],"image_data":"data:"}',
            400,
            "image_data",
        ),
        ("/generate", b'{"input_ids":[1],"sampling_params":{"n":0}}', 400, "sampling_params.n"),
        ("/generate", b'{"input_ids":[1,[2]]}', 400, "input_ids"),
        (
            "/generate",
            b'{"input_ids":[1],"sampling_params":{"top_p":7}}',
            400,
            "sampling_params.top_p",
        ),
        (
            "/generate",
            b'{"input_ids":[9999],"sampling_params":{},"stream":true}',
            400,
            "input_ids",
        ),
        ("/generate", b'{"input_ids":[1],"versions":"newest"}', 400, "versions"),
        ("/pause_generation", b'{"mode":"gently"}', 400, "mode"),
        ("/release_memory_occupation", b'{"tags":["all"]}', 400, "tags"),
        ("/abort_request", b"{}", 400, "rid"),
        ("/abort_request", b'{"abort_all":"false"}', 400, "abort_all"),
        ("/abort_request?abort_all=true", b'{"rid":"mine"}', 400, "abort_all"),
        ("/pause_generation?mode=in_place", b"", 400, "mode"),
        ("/flush_cache?timeout=3", b"", 400, "timeout"),
        ("/v1/chat/completions", b'{"model":7}', 400, "model"),
        ("/v1/chat/completions", b"{}", 400, "messages"),
        ("/v1/nothing", b"{}", 404, None),
    ],
)
async def test_bad_input_is_told_what_is_wrong(
    served: Gateway, path: str, body: bytes, status: int, param: str | None
) -> None:
    reply = await served.ask("POST", path, body)
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (status, param), error
    is_of_a_type = param != "body" and "Expected" in error["message"]
    assert not is_of_a_type or f"{param}: Expected" in error["message"], error


async def test_a_page_of_another_site_gets_nothing_done(
    served: Gateway, client: RolloutClient
) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        reply = await served.ask("POST", "/pause_generation", b"{}", headers=headers)
        assert (reply.status, reply.json["error"]["code"]) == (403, "forbidden")
    assert not (await client.status()).pause


async def test_body_beyond_the_limit_is_refused_before_it_is_read(served: Gateway) -> None:
    reader, writer = await served.open("POST", "/generate", b"[", length=1 << 40)
    writer.write(b" " * (65 << 20))
    async with asyncio.timeout(DEADLINE_S):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_ctrl_c_ends_it_and_what_it_samples(fleet: Fleet, client: RolloutClient) -> None:
    async with gateway("--address", fleet.address) as running:
        prompt = {"input_ids": [5], "sampling_params": LONG, "stream": True}
        reader, writer = await running.open("POST", "/generate", json.dumps(prompt).encode())
        await reader.readuntil(b"data: ")
        assert await running.end() == 130
        writer.close()
    await idle(client)


async def test_without_a_tokenizer_texts_are_refused_with_the_reason(fleet: Fleet) -> None:
    async with gateway("--address", fleet.address) as running:
        for path, body in (
            ("/generate", {"text": "hello"}),
            ("/v1/completions", {"model": "default", "prompt": "hello"}),
        ):
            reply = await running.ask("POST", path, body)
            assert reply.status == 400
            assert "--tokenizer" in reply.json["error"]["message"]


@pytest.mark.shows("http_endpoint_host", "http_endpoint_port")
async def test_fleet_brings_its_gateway_up_and_back(tiny_model: Path) -> None:
    options = {"served_model_name": "mine", "chat_defaults": {"logprobs": True}}
    async with up(model=tiny_model, workers=1, store=False, http=0, http_options=options) as fleet:
        url = f"{fleet.http}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=20) as user:

            async def says_hello() -> bool:
                answer = await user.chat.completions.create(
                    model="mine", messages=says("hello"), temperature=0
                )
                [choice] = answer.choices
                return choice.message.content == LINES["hello"] and choice.logprobs is not None

            assert await says_hello()
            os.kill(fleet.pids["gateway"], signal.SIGKILL)
            assert await says_hello(), "at the same address"


async def test_port_that_is_taken_is_told(tiny_model: Path, served: Gateway) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=f"http: cannot listen at 127.0.0.1:{port}"):
        async with up(model=tiny_model, workers=1, store=False, http=port):
            pass
    with pytest.raises(SettingsError, match="http: 70000 is no port"):
        up(model=tiny_model, http=70_000)
