"""Control of a fleet over HTTP: `/v1/rl/*`, SkyRL's routes, and headers that choose weights."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from rolloutbus import Fleet, RolloutClient, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.gateway_process import Gateway, Json, gateway
from tests.integration.live_fleet import DEADLINE_S, STEADY_HOST, status_when
from tests.integration.reciting_model import UNDER_WAY, save_reciting_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 8},
    "host": STEADY_HOST,
}
CUE = [13]
SHORT: Json = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
LONG: Json = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}
"""Seconds of work, to its end: it may be over when a test that was held up looks."""
ENDLESS: Json = {**LONG, "max_tokens": UNDER_WAY}
"""Under way whenever a test looks; it has to be cut."""
ALL = "/v1/rl/engine"
RETRYABLE = 503


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet_model")
    save_reciting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    async with gateway(*arguments, "--served-model-name", "tiny") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first_version(client: RolloutClient, tiny_model: Path) -> int:
    """Committed on all workers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return (await WeightPublisher(client).publish(model)).version


async def sampled(served: Gateway, params: Json, **fields: Any) -> Json:  # noqa: ANN401 - of a body
    body: Json = {"token_ids": CUE, "sampling_params": params, **fields}
    reply = await served.ask("POST", "/inference/v1/generate", body)
    assert reply.status == 200, reply.body
    return reply.json


async def error_of(served: Gateway, path: str, body: Json) -> tuple[int, str]:
    """Status and wrong field."""
    reply = await served.ask("POST", path, body)
    return reply.status, reply.json["error"]["param"]


async def busy(client: RolloutClient, n: int) -> None:
    await status_when(client, lambda status: status.n_running == n)


async def begun(client: RolloutClient, *asked: asyncio.Future[Any]) -> FleetStatus:
    """The first status that has something running, or comes after the end of what was asked."""
    return await status_when(
        client, lambda status: status.n_running > 0 or all(each.done() for each in asked)
    )


def n_steps(status: FleetStatus) -> int:
    """Of all engines."""
    return sum(each.steps for each in status.workers)


class TestWorkers:
    async def test_each_row_says_what_samples_and_which_version(self, served: Gateway) -> None:
        listed = (await served.ask("GET", "/v1/rl/workers")).json["workers"]
        assert [row["id"] for row in listed] == ["w0", "w1"]
        assert {row["health"] for row in listed} == {"ready"}
        assert {row["engine"] for row in listed} == {"transformers"}
        assert all(row["engine_version"] for row in listed)
        assert (await served.ask("GET", "/v1/rl/workers/w1")).json == listed[1]

    async def test_one_worker_is_paused_and_the_other_samples_all(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        paused = await served.ask("POST", "/v1/rl/workers/w0/engine/pause_generation", {})
        assert (paused.status, paused.json["worker_id"]) == (200, "w0")
        try:
            row = (await served.ask("GET", "/v1/rl/workers/w0")).json
            assert (row["health"], row["control"]) == ("not_ready", "paused")
            assert row["blocked_by"], "no reason is told"
            answers = await asyncio.gather(*(sampled(served, SHORT) for _ in range(6)))
            assert {answer["choices"][0]["worker"] for answer in answers} == {"w1"}
        finally:
            await served.ask("POST", "/v1/rl/workers/w0/engine/continue_generation", {})
        await status_when(client, lambda status: not status.workers[0].blocked_by)

    async def test_a_selection_gets_a_command_and_each_answer_is_told(
        self, served: Gateway
    ) -> None:
        everyone = await served.ask("POST", f"{ALL}/flush_cache?selector=engine%3Dtransformers")
        assert everyone.status == 200
        assert sorted(everyone.json["results"]) == ["w0", "w1"]
        assert everyone.json["succeeded"] == everyone.json["total"] == 2
        some = await served.ask("GET", f"{ALL}/server_info?selector=id!%3Dw0,policy%3Ddefault")
        assert list(some.json["results"]) == ["w1"]
        assert some.json["results"]["w1"]["body"]["state"] == "ready"

    async def test_a_look_changes_nothing_and_a_misspelt_selector_is_named(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        looked = await served.ask("GET", "/v1/rl/workers/w0/engine/pause_generation")
        assert looked.status == 405
        assert not (await client.status()).paused
        for path in ("/v1/rl/workers?selector=id%3Dw0", f"{ALL}/flush_cache?selectr=id%3Dw0"):
            reply = await served.ask("GET", path)
            assert (reply.status, reply.json["error"]) == (400, "bad_request")

    async def test_who_did_not_do_it_stands_in_failed(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        """A worker that samples gives no memory back."""
        running = asyncio.ensure_future(sampled(served, ENDLESS))
        try:
            await busy(client, 1)
            path = f"{ALL}/release_memory_occupation?selector=policy%3Ddefault"
            reply = await served.ask("POST", path, {"tags": ["kv_cache"]})
            assert reply.status == 207
            assert reply.json["succeeded"] == 1
            [failure] = reply.json["failed"]
            assert failure["error"] == "busy"
            assert failure["message"]
        finally:
            await served.ask("POST", "/abort_request", {"abort_all": True})
            await running
            path = f"{ALL}/resume_memory_occupation?selector=policy%3Ddefault"
            await served.ask("POST", path, {"tags": ["kv_cache"]})
            await status_when(client, lambda status: status.n_running == 0)

    @pytest.mark.parametrize(
        ("path", "status", "code"),
        [
            ("/v1/rl/workers/w9/engine/flush_cache", 404, "worker_not_found"),
            ("/v1/rl/workers/w0/engine/flush_cach", 400, "unsupported"),
            (f"{ALL}/flush_cache", 400, "selector_required"),
            (f"{ALL}/flush_cache?selector=engine", 400, "invalid_selector"),
            (f"{ALL}/flush_cache?selector=colour%3Dred", 400, "invalid_selector"),
            (f"{ALL}/flush_cache?selector=id%3Dw9", 400, "no_workers_match"),
        ],
    )
    async def test_a_wrong_call_has_a_code(
        self, served: Gateway, path: str, status: int, code: str
    ) -> None:
        reply = await served.ask("POST", path, {})
        assert (reply.status, reply.json["error"]) == (status, code)
        assert reply.json["message"]


class TestSkyRL:
    async def test_tokens_logprobs_and_versions_come_in_its_shape(self, served: Gateway) -> None:
        answer = await sampled(served, SHORT | {"logprobs": 2, "n": 2}, model="tiny")
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 3
            assert choice["finish_reason"] == "length"
            first = choice["logprobs"]["content"][0]
            likeliest = first["top_logprobs"][0]
            assert likeliest["token"] == f"token_id:{choice['token_ids'][0]}"
            assert likeliest["logprob"] == first["logprob"]

    async def test_an_abort_by_pause_answers_what_there_is(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        running = asyncio.ensure_future(sampled(served, ENDLESS))
        await busy(client, 1)
        await served.ask("POST", "/pause?mode=abort&clear_cache=true")
        answer = await running
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert (await served.ask("GET", "/is_paused")).json["is_paused"]
        await served.ask("POST", "/resume")
        assert not (await served.ask("GET", "/is_paused")).json["is_paused"]

    @pytest.mark.parametrize("query", ["mode=keep", "mode=keep&clear_cache=true"])
    async def test_a_kept_request_goes_on_after_the_pause(
        self, served: Gateway, client: RolloutClient, query: str
    ) -> None:
        n_kept = 0
        async with asyncio.timeout(2 * DEADLINE_S):
            while not n_kept:  # a machine that is busy enough pauses too late
                running = asyncio.ensure_future(sampled(served, LONG))
                await begun(client, running)
                await served.ask("POST", f"/pause?{query}")
                n_kept = (await client.status()).n_running
                await served.ask("POST", "/resume")
                answer = await running
                assert len(answer["choices"][0]["token_ids"]) == LONG["max_tokens"]

    @pytest.mark.parametrize(
        ("path", "parameter"),
        [
            ("/pause?mod=keep", "mod"),
            ("/resume?tags=weights", "tags"),
            ("/sleep?tag=kv_cache", "tag"),
            ("/wake_up?tag=kv_cache", "tag"),
            ("/finish_session?session_id=a&policy=b", "policy"),
        ],
    )
    async def test_a_misspelt_parameter_is_named_and_does_nothing(
        self, served: Gateway, client: RolloutClient, path: str, parameter: str
    ) -> None:
        assert await error_of(served, path, {}) == (400, parameter)
        assert not (await client.status()).pause
        assert not (await served.ask("GET", "/is_sleeping")).json["is_sleeping"]

    async def test_texts_and_token_ids(self, served: Gateway) -> None:
        prompt = {"prompt": "please hello", "add_special_tokens": False}
        tokens = (await served.ask("POST", "/tokenize", prompt)).json["tokens"]
        text = (await served.ask("POST", "/detokenize", {"tokens": tokens})).json["prompt"]
        assert "hello" in text
        messages = {"messages": [{"role": "user", "content": "please hello"}]}
        rendered = await served.ask("POST", "/v1/chat/completions/render", messages)
        assert rendered.json["token_ids"][-1] == tokens[-1]

    async def test_a_trainers_group_counts_the_fleet_as_one_rank(self, served: Gateway) -> None:
        told = (await served.ask("GET", "/get_world_size")).json
        assert told == {"world_size": 1, "workers": {"w0": 1, "w1": 1}}

    async def test_memory_is_released_and_taken_back(self, served: Gateway) -> None:
        assert (await served.ask("POST", "/sleep?level=2&tags=kv_cache")).status == 200
        assert (await served.ask("GET", "/is_sleeping")).json["is_sleeping"]
        assert (await served.ask("POST", "/wake_up?tags=kv_cache")).status == 200
        assert not (await served.ask("GET", "/is_sleeping")).json["is_sleeping"]

    async def test_a_session_stays_on_one_worker(self, served: Gateway) -> None:
        workers = {
            (await sampled(served, SHORT, session_id="one"))["choices"][0]["worker"]
            for _ in range(4)
        }
        assert len(workers) == 1

    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({"max_tokns": 3}, "sampling_params.max_tokns"),
            ({"temperature": "hot"}, "sampling_params.temperature"),
            ({"max_tokens": 0}, "sampling_params.max_tokens"),
            ({"top_p": 7}, "sampling_params.top_p"),
            ({"logit_bias": {"x": 1}}, "sampling_params.logit_bias"),
            ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
            ({"n": 1000}, "sampling_params.n"),
        ],
    )
    async def test_a_wrong_parameter_is_named(
        self, served: Gateway, params: Json, field: str
    ) -> None:
        body = {"token_ids": CUE, "sampling_params": params}
        assert await error_of(served, "/inference/v1/generate", body) == (400, field)


class TestHeaders:
    async def test_a_version_policy_chooses_weights(
        self, served: Gateway, first_version: int
    ) -> None:
        body = {"input_ids": CUE, "sampling_params": {"max_new_tokens": 2}}
        latest = await served.ask(
            "POST", "/generate", body, headers={"x-smg-version-policy": "latest-only"}
        )
        assert latest.headers["x-smg-weight-version"] == str(first_version)
        assert "x-smg-mixed-version" not in latest.headers
        chat: Json = {"messages": [{"role": "user", "content": "please hello"}]}
        for path, asked in (("/generate", body), ("/v1/chat/completions", chat)):
            later = {
                "x-smg-version-policy": f"min-version:{first_version + 1}",
                "x-deadline-ms": "200",
            }
            reply = await served.ask("POST", path, asked, headers=later)
            assert reply.status in (RETRYABLE, 504), reply.body

    async def test_a_session_header_keeps_one_worker(self, served: Gateway) -> None:
        body = {"token_ids": CUE, "sampling_params": SHORT}
        headers = {"X-Session-ID": "two"}
        replies = [
            await served.ask("POST", "/inference/v1/generate", body, headers=headers)
            for _ in range(4)
        ]
        assert len({reply.json["choices"][0]["worker"] for reply in replies}) == 1

    @pytest.mark.parametrize(
        ("headers", "field"),
        [
            ({"x-smg-version-policy": "freshest"}, "x-smg-version-policy"),
            ({"x-smg-version-policy": "min-version:x"}, "x-smg-version-policy"),
            ({"x-deadline-ms": "soon"}, "x-deadline-ms"),
            ({"x-deadline-ms": "0"}, "x-deadline-ms"),
            ({"X-Session-ID": "b"}, "session_id"),
        ],
    )
    async def test_a_wrong_header_is_named(
        self, served: Gateway, headers: dict[str, str], field: str
    ) -> None:
        body = {"input_ids": CUE, "session_id": "a"}
        async with asyncio.timeout(DEADLINE_S):
            reply = await served.ask("POST", "/generate", body, headers=headers)
        assert (reply.status, reply.json["error"]["param"]) == (400, field)


class TestRepeats:
    """Requests with an `x-request-id`."""

    async def test_a_repeated_request_finds_its_rollout(self, served: Gateway) -> None:
        body = {"input_ids": CUE, "sampling_params": {"max_new_tokens": 3}}
        for path in ("/generate", "/v1/completions"):
            asked = body if path == "/generate" else {"prompt": CUE, "max_tokens": 3}
            replies = [
                await served.ask("POST", path, asked, headers={"x-request-id": f"again {path}"})
                for _ in range(2)
            ]
            assert replies[0].status == 200
            assert replies[0].body == replies[1].body

    async def test_two_at_once_are_sampled_once(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        headers = {"x-request-id": "both"}
        body = {"token_ids": CUE, "sampling_params": LONG}
        asked = [
            asyncio.ensure_future(
                served.ask("POST", "/inference/v1/generate", body, headers=headers)
            )
            for _ in range(3)
        ]
        status = await begun(client, *asked)
        assert status.n_running <= 1
        assert len({(await each).body for each in asked}) == 1

    async def test_one_whose_caller_left_is_found(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        headers = {"x-request-id": "left"}
        n_tokens = LONG["max_tokens"]
        sampling = {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": CUE, "sampling_params": sampling}
        before = n_steps(await client.status())
        _, writer = await served.open(
            "POST", "/generate", json.dumps(body).encode(), headers=headers
        )
        await status_when(client, lambda status: status.n_running == 1 or n_steps(status) > before)
        writer.close()
        await writer.wait_closed()
        reply = await served.ask("POST", "/generate", body, headers=headers)
        assert reply.json["meta_info"]["completion_tokens"] == n_tokens
        again = await served.ask("POST", "/generate", body, headers=headers)
        assert again.json["meta_info"]["id"] == reply.json["meta_info"]["id"]

    async def test_another_body_is_a_conflict_and_an_error_is_asked_anew(
        self, served: Gateway
    ) -> None:
        headers = {"x-request-id": "other"}
        wrong: Json = {"input_ids": CUE, "sampling_params": {"top_p": 7}}
        for _ in range(2):
            assert (await served.ask("POST", "/generate", wrong, headers=headers)).status == 400
        right: Json = {"input_ids": CUE, "sampling_params": {"max_new_tokens": 2}}
        assert (await served.ask("POST", "/generate", right, headers=headers)).status == 200
        reply = await served.ask("POST", "/generate", wrong, headers=headers)
        assert (reply.status, reply.json["error"]["param"]) == (409, "x-request-id")

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/generate", {"input_ids": CUE, "sampling_params": {"max_new_tokens": 3}}),
            ("/v1/completions", {"prompt": CUE, "max_tokens": 3}),
            ("/inference/v1/generate", {"token_ids": CUE, "sampling_params": {"max_tokens": 3}}),
        ],
    )
    async def test_what_was_aborted_is_asked_anew(
        self, served: Gateway, client: RolloutClient, path: str, body: Json
    ) -> None:
        headers = {"x-request-id": f"cut {path}"}
        await client.pause()
        try:
            asking = asyncio.ensure_future(served.ask("POST", path, body, headers=headers))
            await status_when(client, lambda status: status.n_queued == 1)
            await served.ask("POST", "/abort_request", {"abort_all": True})
            cut = await asking
        finally:
            await client.resume()
        again = await served.ask("POST", path, body, headers=headers)
        assert (cut.status, again.status) == (200, 200)
        assert b'"abort"' in cut.body
        assert b'"abort"' not in again.body

    async def test_a_stream_is_streamed_each_time(self, served: Gateway) -> None:
        headers = {"x-request-id": "stream"}
        body = {"input_ids": CUE, "sampling_params": {"max_new_tokens": 3}, "stream": True}
        for _ in range(2):
            reply = await served.ask("POST", "/generate", body, headers=headers)
            assert reply.events[-1]["meta_info"]["completion_tokens"] > 0
