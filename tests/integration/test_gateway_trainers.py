"""The calls that slime and miles make to SGLang's engines and router, one by one, at a gateway.

Written from their public sources of August 2026. Each reply has what they read from it.
"""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio
import base64
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from rolloutbus import Fleet, RolloutClient
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, Json, Reply, gateway
from tests.integration.live_fleet import STEADY_HOST, status_when
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
PROMPT = [13, 20, 7]
SLIME: Json = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 6,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""Sampling parameters as slime sends them by default; miles has the same."""
ENDLESS: Json = {**SLIME, "max_new_tokens": UNDER_WAY, "ignore_eos": True}
N_ROLLOUTS = 4


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainers_model")
    save_reciting_model(path)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainers write checkpoints."""
    return tmp_path_factory.mktemp("trainers_root")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path, root: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    async with gateway(*arguments, "--weights-root", str(root)) as running:
        yield running


async def asked(served: Gateway, method: str, path: str, body: Json | None = None) -> Any:  # noqa: ANN401
    """What is answered; both programs raise if it is not 2xx."""
    reply = await served.ask(method, path, body or {})
    assert reply.status == 200, (path, reply.body)
    return reply.json


def same_key(served: Gateway, body: Json, key: str) -> asyncio.Task[Reply]:
    """A request that both programs send with a routing key, so that one engine has its prefix."""
    headers = {"X-SMG-Routing-Key": key}
    return asyncio.create_task(served.ask("POST", "/generate", body, headers))


def ints(text: str) -> list[int]:
    """int32 in base64, as both programs decode arrays."""
    return np.frombuffer(base64.b64decode(text), np.int32).tolist()


class TestRollouts:
    async def test_slime_samples(self, served: Gateway) -> None:
        body = {"sampling_params": SLIME, "return_logprob": True, "input_ids": PROMPT}
        first, again = [(await same_key(served, body, "sample-1")).json for _ in range(2)]
        meta = first["meta_info"]
        assert isinstance(first["text"], str)
        assert [token for _, token, *_ in meta["output_token_logprobs"]] == first["output_ids"]
        assert all(logprob <= 0 for logprob, *_ in meta["output_token_logprobs"])
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert (meta["prompt_tokens"], meta["weight_version"]) == (len(PROMPT), "0")
        assert meta["completion_tokens"] == len(first["output_ids"])
        assert isinstance(meta["cached_tokens"], int)
        assert again["meta_info"]["worker"] == meta["worker"], "a routing key is an affinity"

    async def test_slime_streams(self, served: Gateway) -> None:
        sampling = {**ENDLESS, "max_new_tokens": 40}
        body = {"sampling_params": sampling, "return_logprob": True, "stream": True}
        reply = await served.ask("POST", "/generate", {**body, "input_ids": PROMPT})
        counts = [len(each["meta_info"]["output_token_logprobs"]) for each in reply.events]
        assert counts == sorted(counts), "each event tells all so far"
        assert counts[-1] == 40
        assert [bool(each["meta_info"]["finish_reason"]) for each in reply.events[:-1]] == (
            [False] * (len(counts) - 1)
        )
        for each in reply.events:
            tokens = [token for _, token, *_ in each["meta_info"]["output_token_logprobs"]]
            assert tokens == each["output_ids"]
        assert reply.events[-1]["meta_info"]["finish_reason"]["type"] == "length"

    async def test_slime_replays_the_support_of_top_p(self, served: Gateway) -> None:
        custom = {"custom_params": {"return_top_p_token_ids": True}}
        sampling = {**SLIME, "top_p": 0.9, "ignore_eos": True, **custom}
        body = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT}
        reply = await asked(served, "POST", "/generate", body)
        meta = reply["meta_info"]
        support, offsets = ints(meta["top_p_token_ids"]), ints(meta["top_p_token_offsets"])
        assert (offsets[0], offsets[-1], len(offsets)) == (0, len(support), 7)
        rows = [support[a:b] for a, b in pairwise(offsets)]
        assert all(token in row for token, row in zip(reply["output_ids"], rows, strict=True))

    async def test_miles_samples(self, served: Gateway) -> None:
        replays = {"return_routed_experts": False, "return_indexer_topk": False}
        body = {"input_ids": PROMPT, "sampling_params": SLIME, "return_logprob": True, **replays}
        reply = await asked(served, "POST", "/generate", body)
        meta = reply["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert "routed_experts" not in meta
        assert int(meta["weight_version"]) == 0

    async def test_an_agents_turn_is_aborted_by_its_name(
        self, served: Gateway, client: RolloutClient
    ) -> None:
        body = {"rid": "turn", "input_ids": PROMPT, "sampling_params": ENDLESS}
        turn = same_key(served, {**body, "return_logprob": True}, "session-1")
        await status_when(client, lambda status: status.n_running == 1)
        await asked(served, "POST", "/abort_request", {"rid": "turn"})
        meta = (await turn).json["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"

    @pytest.mark.parametrize("listing", ["/workers", "/list_workers"])
    async def test_a_step_ends_and_what_runs_is_taken_up_later(
        self, served: Gateway, client: RolloutClient, listing: str
    ) -> None:
        body = {"sampling_params": ENDLESS, "return_logprob": True, "input_ids": PROMPT}
        rollouts = [same_key(served, body, f"sample-{i}") for i in range(N_ROLLOUTS)]
        await status_when(client, lambda status: status.n_running == N_ROLLOUTS)

        listed = await asked(served, "GET", listing)
        urls = listed.get("urls") or [each["url"] for each in listed["workers"]]
        assert urls == [served.url], "to abort at each URL is to abort once"
        await asked(served, "POST", "/abort_request", {"abort_all": True})
        partial = [(await each).json for each in rollouts]
        await status_when(client, lambda status: status.n_running == 0)
        loads = (await asked(served, "GET", "/v1/loads?include=core"))["loads"]

        assert [each["num_running_reqs"] for each in loads] == [0, 0]
        for each in partial:
            assert each["meta_info"]["finish_reason"]["type"] == "abort"
            so_far = [token for _, token, *_ in each["meta_info"]["output_token_logprobs"]]
            goes_on = {**body, "input_ids": PROMPT + so_far, "sampling_params": SLIME}
            later = await asked(served, "POST", "/generate", goes_on)
            assert later["meta_info"]["prompt_tokens"] == len(PROMPT) + len(so_far)


class TestEngine:
    async def test_an_external_engine_is_found_and_registered(self, served: Gateway) -> None:
        for path in ("/server_info", "/get_server_info"):
            info = await asked(served, "GET", path)
            assert (info["num_gpus"], info["tp_size"], info["pp_size"]) == (2, 1, 1)
        assert (await served.ask("GET", "/health_generate")).status == 200
        await asked(served, "POST", "/workers", {"url": served.url, "worker_type": "regular"})
        for body in (
            {"url": "http://10.0.0.2:30000"},
            {"url": served.url, "worker_type": "prefill"},
        ):
            reply = await served.ask("POST", "/workers", body)
            assert reply.status == 400
            assert "by itself" in reply.headers["x-error-message"]

    async def test_slime_updates_from_disk(
        self, served: Gateway, root: Path, tiny_model: Path
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        for label in ("1", "2"):
            path = root / f"weight_v{int(label):06d}"
            model.save_pretrained(path)
            await asked(served, "POST", "/pause_generation")
            assert (await served.ask("GET", "/flush_cache")).status == 200
            body = {"model_path": str(path), "weight_version": label}
            reply = await asked(served, "POST", "/update_weights_from_disk", body)
            assert reply["success"], reply
            for asking in ("/get_weight_version", "/model_info"):
                assert (await asked(served, "GET", asking))["weight_version"] == label
            await asked(served, "POST", "/continue_generation")
            sampled = {"sampling_params": SLIME, "return_logprob": True, "input_ids": PROMPT}
            meta = (await asked(served, "POST", "/generate", sampled))["meta_info"]
            assert meta["weight_version"] == label, "slime counts its own steps"
            assert meta["weight_versions"][-1][0] == reply["version"], "the fleet counts its own"

    async def test_miles_begins_names_and_ends_an_update(
        self, served: Gateway, root: Path, tiny_model: Path
    ) -> None:
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(root / "miles")
        early = await served.ask("POST", "/end_weight_update", {})
        assert (early.status, "begin" in early.json["message"]) == (400, True)
        await asked(served, "POST", "/begin_weight_update", {"selector": "all"})
        early = await served.ask("POST", "/end_weight_update", {})
        assert (early.status, "not come" in early.json["message"]) == (400, True)
        path = str(root / "miles")
        await asked(served, "POST", "/update_weights_from_disk", {"model_path": path})
        name = {"new_version": "41", "abort_all_requests": False}
        await asked(served, "POST", "/update_weight_version", name)
        await asked(served, "POST", "/end_weight_update", {})
        assert (await asked(served, "GET", "/get_weight_version"))["weight_version"] == "41"

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    async def test_miles_pauses_and_checks(self, served: Gateway, mode: str) -> None:
        await asked(served, "POST", "/pause_generation", {"mode": mode})
        assert (await served.ask("GET", "/flush_cache")).status == 200
        await asked(served, "POST", "/continue_generation")
        body = {"action": "checksum", "allow_quant_error": False, "selector": "all"}
        assert (await asked(served, "POST", "/weights_checker", body))["success"]

    @pytest.mark.parametrize(
        ("path", "body", "reason"),
        [
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "safetensors"),
            ("/weights_checker", {"action": "snapshot"}, "compare"),
            ("/generate", {"input_ids": PROMPT, "extra_key": "a:v1"}, "leave it out"),
            ("/generate", {"input_ids": PROMPT, "return_indexer_topk": True}, "leave it out"),
            (
                "/generate",
                {"input_ids": PROMPT, "sampling_params": {"custom_params": {"other": 1}}},
                "other",
            ),
        ],
    )
    async def test_what_is_not_served_is_refused_with_what_is(
        self, served: Gateway, path: str, body: Json, reason: str
    ) -> None:
        reply = await served.ask("POST", path, body)
        assert reply.status == 400
        assert reason in reply.json["error"]["message"]

    async def test_logprobs_of_a_prompt_take_an_engine_that_has_them(self, served: Gateway) -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await served.ask("POST", "/generate", body)
        assert reply.status == 400
        assert "prompt_logprobs" in reply.json["error"]["message"]
