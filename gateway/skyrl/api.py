"""The routes of SkyRL's remote client, which are vLLM's: samples by token ids, and control."""

from collections.abc import Mapping
from math import prod
from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.control import MemoryTag, PauseMode, ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.gateway.adapters import LoadBody, load_on_all
from rolloutbus.gateway.engine_routes import MEMORY_TAGS, SLOW_S, check_fields, check_query
from rolloutbus.gateway.exchange import (
    IS_CUT,
    DirectRoute,
    Json,
    as_json,
    body_of,
    converted,
    while_connected,
)
from rolloutbus.gateway.headers import version_headers, with_headers
from rolloutbus.gateway.models import ModelNames
from rolloutbus.gateway.problems import with_field_of
from rolloutbus.gateway.samples import sampled
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.skyrl.body import (
    VllmLoadBody,
    VllmUnloadBody,
    options_of,
    reply_of,
    sampling_of,
    vllm_body,
    vllm_sampling,
)
from rolloutbus.gateway.trainer_groups import TrainerGroups
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.openai.bodies import ChatBody
from rolloutbus.trainer_adapter.openai.bodies import body_of as chat_body_of
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer, chat_prompt

PAUSE_MODES: Mapping[str, PauseMode] = {"abort": "abort", "keep": "in_place", "wait": "drain"}
"""vLLM's word -> the bus's."""
SLEEP_LEVELS = ("1", "2")
FIELD_OF_BUS = {
    "prompt": "token_ids",
    "session": "session_id",
    "deadline_s": "timeout",
    "lora": "model",
    "want.prompt_logprobs": "sampling_params.prompt_logprobs",
    "want.top_logprobs": "sampling_params.logprobs",
    "sampling.max_new_tokens": "sampling_params.max_tokens",
    "sampling.min_new_tokens": "sampling_params.min_tokens",
}
"""Name of a field on the bus -> in the body."""


class SkyRLApi:
    """Answers SkyRL's remote client through a client of the bus."""

    def __init__(
        self,
        client: RolloutClient,
        settings: GatewaySettings,
        tokenizer: ChatTokenizer | None,
        groups: TrainerGroups,
    ) -> None:
        self._client = client
        self._settings = settings
        self._groups = groups
        self._tokenizer = tokenizer
        self._names = ModelNames(client, settings.served_names)
        self.direct = [
            DirectRoute("/inference/v1/generate", self.generate, "POST"),
            DirectRoute("/skyrl/v1/generate", self.generate_with_experts, "POST"),
        ]
        self.router = APIRouter()
        for path, answer, method in (
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/v1/chat/completions/render", self.render, "POST"),
            ("/pause", self.pause, "POST"),
            ("/resume", self.resume, "POST"),
            ("/is_paused", self.is_paused, "GET"),
            ("/sleep", self.sleep, "POST"),
            ("/wake_up", self.wake_up, "POST"),
            ("/is_sleeping", self.is_sleeping, "GET"),
            ("/reset_prefix_cache", self.reset_prefix_cache, "POST"),
            ("/get_world_size", self.get_world_size, "GET"),
            ("/finish_session", self.finish_session, "POST"),
            ("/skyrl/v1/load_lora_adapter", self.reload_lora, "POST"),
            ("/v1/load_lora_adapter", self.load_lora, "POST"),
            ("/v1/unload_lora_adapter", self.unload_lora, "POST"),
        ):
            self.router.add_api_route(path, answer, methods=[method])

    async def generate(self, request: Request) -> Response:
        """`POST /inference/v1/generate`: samples of one prompt of token ids."""
        return await self._generated(request, with_experts=False)

    async def generate_with_experts(self, request: Request) -> Response:
        """`POST /skyrl/v1/generate`: the same, with the experts that each place went to."""
        return await self._generated(request, with_experts=True)

    async def _generated(self, request: Request, *, with_experts: bool) -> Response:
        fields = with_headers(request, await self._body(request))
        body = vllm_body(fields)
        vllm = vllm_sampling(body.sampling_params)
        options = options_of(body, vllm, with_experts=with_experts)
        options |= await self._names.options(body.model)
        sampling = sampling_of(vllm, self._settings.default_max_tokens)
        work = sampled(self._client, [body.token_ids], sampling, vllm.n or 1, options)
        try:
            rollouts = await while_connected(request, work)
        except BusError as error:
            raise with_field_of(FIELD_OF_BUS, error) from error
        request.scope[IS_CUT] = any(each.finish_reason == "abort" for each in rollouts)
        runs = [run for rollout in rollouts for run in rollout.version_runs]
        return as_json(reply_of(rollouts, body, vllm), headers=version_headers(runs))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: token ids of a text."""
        body = await self._body(request)
        check_fields(body, ("model", "prompt", "add_special_tokens"))
        text = body.get("prompt")
        if not isinstance(text, str):
            raise Refused(bad_request("prompt", "a prompt is a text"))
        is_marked = body.get("add_special_tokens", True)
        if not isinstance(is_marked, bool):
            raise Refused(bad_request("add_special_tokens", "it is true or false"))
        tokens = self._with_tokenizer("prompt").encode(text, add_special_tokens=is_marked)
        return as_json({"tokens": list(tokens), "count": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids, with special tokens."""
        body = await self._body(request)
        check_fields(body, ("model", "tokens"))
        tokens = body.get("tokens")
        try:
            ids = msgspec.convert(tokens, list[int])
            text = self._with_tokenizer("tokens").decode(ids, skip_special_tokens=False)
        except (msgspec.ValidationError, OverflowError, IndexError) as error:
            raise Refused(
                bad_request("tokens", f"tokens are a list of token ids: {error}")
            ) from error
        return as_json({"prompt": str(text)})

    async def render(self, request: Request) -> Response:
        """`POST /v1/chat/completions/render`: token ids of a conversation, by the chat template."""
        body = chat_body_of(await self._body(request), ChatBody)
        prompt = chat_prompt(body, self._with_tokenizer("messages"))
        if prompt.media:
            message = "media have places of the engine's own choice; send them to be answered"
            raise Refused(Problem("unsupported", message, "not_started", field="messages"))
        return as_json({"model": body.model, "token_ids": prompt.tokens, "features": None})

    async def pause(self, request: Request) -> Response:
        """`POST /pause?mode=keep|wait|abort&clear_cache=`: the fleet samples nothing.

        `keep` freezes requests, with `clear_cache` without their cache; `wait` lets them end;
        `abort` ends this gateway's requests, which answer what they have.
        """
        check_query(request, "mode", "clear_cache")
        said = request.query_params.get("mode", "abort")
        if said not in PAUSE_MODES:
            raise Refused(bad_request("mode", f"a mode is one of {', '.join(PAUSE_MODES)}"))
        clears = _flag(request, "clear_cache", default=False)
        mode = PAUSE_MODES[said]
        if clears and mode == "in_place":
            mode = "retract"
        await self._client.pause(mode, deadline_s=SLOW_S)
        if mode == "abort":
            await self._client.abort()
        if clears:
            await self._client.reset_prefix_cache(deadline_s=SLOW_S)
        return as_json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """`POST /resume`: ends the pause."""
        check_query(request)
        self._groups.require_none_open()
        await self._client.resume(deadline_s=SLOW_S)
        return as_json({"status": "resumed"})

    async def is_paused(self) -> Response:
        """`GET /is_paused`: whether the fleet is to sample nothing."""
        return as_json({"is_paused": bool((await self._client.status()).pause)})

    async def sleep(self, request: Request) -> Response:
        """`POST /sleep?level=1|2&tags=`: releases engine memory; the fleet must be idle.

        The level changes nothing: an engine with a copy of its weights keeps it, and one without
        takes no request until new weights come.
        """
        check_query(request, "level", "tags")
        level = request.query_params.get("level", "1")
        if level not in SLEEP_LEVELS:
            raise Refused(bad_request("level", f"a level is one of {', '.join(SLEEP_LEVELS)}"))
        result = await self._client.sleep(_tags(request), deadline_s=SLOW_S)
        return as_json(_done(result))

    async def wake_up(self, request: Request) -> Response:
        """`POST /wake_up?tags=`: takes released memory back."""
        check_query(request, "tags")
        result = await self._client.wake_up(_tags(request), deadline_s=SLOW_S)
        return as_json(_done(result))

    async def is_sleeping(self) -> Response:
        """`GET /is_sleeping`: whether some worker has released memory."""
        facts = await self._client.server_info()
        asleep = [
            name
            for name, each in facts.by_worker.items()
            if isinstance(each, ServerFacts) and each.asleep
        ]
        return as_json({"is_sleeping": bool(asleep), "workers": asleep})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`: forgets cached prefixes, of running requests if asked to."""
        check_query(request)
        body = await self._body(request)
        check_fields(body, ("reset_running_requests",))
        resets = body.get("reset_running_requests", False)
        if not isinstance(resets, bool):
            raise Refused(bad_request("reset_running_requests", "it is true or false"))
        await self._client.reset_prefix_cache(reset_running_requests=resets, deadline_s=SLOW_S)
        return as_json({"status": "ok"})

    async def get_world_size(self) -> Response:
        """`GET /get_world_size`: 1, since a trainer's group counts the fleet as one rank.

        `workers` tells over how many ranks each engine is split.
        """
        facts = await self._client.server_info()
        ranks = {
            name: prod(each.parallel.get(kind, 1) for kind in ("tp", "pp", "dp"))
            for name, each in facts.by_worker.items()
            if isinstance(each, ServerFacts)
        }
        return as_json({"world_size": 1, "workers": ranks})

    async def finish_session(self, request: Request) -> Response:
        """`POST /finish_session?session_id=`: answers ok, since an idle session holds nothing.

        Requests with a session id share a worker while one of them runs or was there lately; only
        sessions opened by a client of the bus hold a place.
        """
        check_query(request, "session_id")
        name = request.query_params.get("session_id", "")
        if not name:
            raise Refused(bad_request("session_id", "which session? ?session_id=NAME"))
        return as_json({"status": "ok", "session_id": name})

    async def load_lora(self, request: Request) -> Response:
        """`POST /v1/load_lora_adapter`: loads it on all workers; where one cannot, on none."""
        body = converted(await self._body(request), VllmLoadBody)
        return await self._loaded(request, body, replaces=body.load_inplace)

    async def reload_lora(self, request: Request) -> Response:
        """`POST /skyrl/v1/load_lora_adapter`: the same; takes the place of one of its name."""
        body = converted(await self._body(request), LoadBody)
        return await self._loaded(request, body, replaces=True)

    async def _loaded(self, request: Request, body: LoadBody, *, replaces: bool) -> Response:
        work = load_on_all(self._client, body, replaces=replaces)
        result = await while_connected(request, work)
        return as_json({**_done(result), "lora_name": body.lora_name})

    async def unload_lora(self, request: Request) -> Response:
        """`POST /v1/unload_lora_adapter`: forgets an adapter."""
        body = converted(await self._body(request), VllmUnloadBody)
        result = await self._client.unload_lora(body.lora_name, deadline_s=SLOW_S)
        return as_json({**_done(result), "lora_name": body.lora_name})

    async def _body(self, request: Request) -> Json:
        return await body_of(request, self._settings.max_body_bytes)

    def _with_tokenizer(self, field: str) -> ChatTokenizer:
        if self._tokenizer is None:
            message = (
                "this gateway has no tokenizer, so it takes token ids only; "
                "start it with --tokenizer MODEL_DIRECTORY"
            )
            raise Refused(Problem("unsupported", message, "not_started", field=field))
        return self._tokenizer


def _tags(request: Request) -> list[MemoryTag]:
    tags = request.query_params.getlist("tags") or ["weights", "kv_cache"]
    if not set(tags) <= set(MEMORY_TAGS):
        raise Refused(bad_request("tags", f"tags are {', '.join(MEMORY_TAGS)}"))
    return cast("list[MemoryTag]", tags)


def _flag(request: Request, name: str, *, default: bool) -> bool:
    said = request.query_params.get(name, str(default)).lower()
    if said not in ("true", "false"):
        raise Refused(bad_request(name, f"{name} is true or false, not {said[:32]!r}"))
    return said == "true"


def _done(result: FleetResult) -> Json:
    return {"status": "ok", "workers": list(result.by_worker)}
