"""OpenAI's endpoints: chats, completions, embeddings and the list of models."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.gateway.exchange import (
    IS_CUT,
    DirectRoute,
    EventStream,
    Json,
    as_json,
    body_of,
    while_connected,
)
from rolloutbus.gateway.headers import version_headers, with_headers
from rolloutbus.gateway.models import DEFAULT_POLICY, ModelNames
from rolloutbus.gateway.problems import openai_error
from rolloutbus.gateway.samples import CachedTokens
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.openai.client import OpenAIClient
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer
from rolloutbus.trainer_adapter.openai.sglang_reader import SglangParsers

Whole = Callable[..., Any]
FIELD_OF_OPTION = {"versions": "versions", "policy": "policy", "lora": "lora_path"}


class OpenAIApi:
    """Answers OpenAI's requests through a client of the bus."""

    def __init__(
        self,
        client: RolloutClient,
        settings: GatewaySettings,
        tokenizer: ChatTokenizer | None,
        parsers: SglangParsers | None,
        cached: CachedTokens,
    ) -> None:
        self._client = client
        self._settings = settings
        self._cached = cached
        self._names = ModelNames(client, settings.served_names)
        self._openai = (
            OpenAIClient(
                client,
                tokenizer,
                tool_format=settings.tool_format,
                reasoning_format=settings.reasoning_format,
                parsers=parsers,
                default_max_tokens=settings.default_max_tokens,
            )
            if tokenizer is not None
            else None
        )
        self.direct = [
            DirectRoute("/v1/chat/completions", self.chat, "POST"),
            DirectRoute("/v1/completions", self.completion, "POST"),
        ]
        self.router = APIRouter(prefix="/v1")
        self.router.add_api_route("/embeddings", self.embeddings, methods=["POST"])
        self.router.add_api_route("/models", self.models, methods=["GET"])
        self.router.add_api_route("/models/{model:path}", self.model, methods=["GET"])

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: a chat completion, whole or as server-sent events."""
        openai = self._with_tokenizer()
        body, options = await self._asked(request)
        body = {**self._settings.chat_defaults, **body}
        whole, pieces = openai.chat_completion, openai.chat_completion_stream
        return await self._answered(request, whole, pieces, body, options)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`: a completion, whole or as server-sent events."""
        openai = self._with_tokenizer()
        body, options = await self._asked(request)
        whole, pieces = openai.completion, openai.completion_stream
        return await self._answered(request, whole, pieces, body, options)

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`: one vector for each input."""
        openai = self._with_tokenizer()
        body, options = await self._asked(request)
        if options.keys() - {"policy"}:
            message = "embeddings have the policy's active weights; leave version and adapter out"
            raise Refused(Problem("unsupported", message, "not_started", field="model"))
        asked = {**body, **options}
        return as_json(await while_connected(request, openai.embeddings(asked)))

    async def models(self) -> Response:
        """`GET /v1/models`: the served name, and each policy that workers have."""
        return as_json({"object": "list", "data": await self._cards()})

    async def model(self, model: str) -> Response:
        """`GET /v1/models/NAME`."""
        cards = await self._cards()
        for card in cards:
            if card["id"] == model:
                return as_json(card)
        await self._names.options(model)
        return as_json({**cards[0], "id": model})

    async def _cards(self) -> list[Json]:
        status = await self._client.status()
        newest: dict[str, int] = {}
        for worker in status.workers:
            newest[worker.policy] = max(worker.version, newest.get(worker.policy, 0))
        newest |= status.committed
        names = {self._settings.served_names[0]: DEFAULT_POLICY} | {
            policy: policy for policy in sorted(newest) if policy != DEFAULT_POLICY
        }
        return [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "rolloutbus",
                "policy": policy,
                "weight_version": newest.get(policy, 0),
            }
            for name, policy in names.items()
        ]

    async def _asked(self, request: Request) -> tuple[Json, GenerateOptions]:
        """The body, and what the name of its model asks for."""
        body = with_headers(request, await body_of(request, self._settings.max_body_bytes))
        model = body.get("model") or ""
        if not isinstance(model, str):
            raise Refused(bad_request("model", "the name of a model is a text"))
        options = await self._names.options(model)
        for option, field in FIELD_OF_OPTION.items():
            if option in options and body.get(field) is not None:
                message = f"model {model[:64]!r} and {field} both choose; leave one out"
                raise Refused(bad_request(field, message))
        return body, options

    async def _answered(
        self,
        request: Request,
        whole: Callable[..., Awaitable[Json]],
        pieces: Callable[..., AsyncGenerator[Json]],
        body: Json,
        options: GenerateOptions,
    ) -> Response:
        async def ask(want: Want) -> Response:
            wanting: GenerateOptions = {**options, "want": want}
            if body.get("stream"):
                return await EventStream.of(request, pieces(body, **wanting), openai_error)
            return await _whole(request, whole(body, **wanting))

        return await self._cached.told(ask)

    def _with_tokenizer(self) -> OpenAIClient:
        if self._openai is None:
            message = (
                "this gateway has no tokenizer, so it takes token ids only, at /generate; "
                "start it with --tokenizer MODEL_DIRECTORY"
            )
            raise Refused(Problem("unsupported", message, "not_started", field="model"))
        return self._openai


async def _whole(request: Request, work: Awaitable[Json]) -> Response:
    answer = await while_connected(request, work)
    request.scope[IS_CUT] = any(each["finish_reason"] == "abort" for each in answer["choices"])
    runs = [run for choice in answer["choices"] for run in choice["weight_versions"]]
    return as_json(answer, headers=version_headers(runs))
