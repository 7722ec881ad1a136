"""SGLang's `/generate` and `/abort_request`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.gateway.engine_routes import check_fields
from rolloutbus.gateway.exchange import EventStream, Json, as_json, body_of, while_connected
from rolloutbus.gateway.headers import version_headers, with_headers
from rolloutbus.gateway.problems import openai_error
from rolloutbus.gateway.samples import sampled
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.generate_body import (
    GenerateBody,
    Prompts,
    by_body,
    generate_body,
    prompts_of,
    reply_of,
    text_of,
)
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Delta, RolloutCancelled
from rolloutbus.trainer_adapter.client.text import Tokenizer


class GenerationApi:
    """Answers SGLang's requests for samples through a client of the bus."""

    def __init__(
        self, client: RolloutClient, settings: GatewaySettings, tokenizer: Tokenizer | None
    ) -> None:
        self._client = client
        self._settings = settings
        self._tokenizer = tokenizer
        self._rids: dict[str, list[str]] = {}
        """The callers' names of requests under way -> the bus's."""
        self.router = APIRouter()
        for path, answer, methods in (
            ("/generate", self.generate, ["POST", "PUT"]),
            ("/abort_request", self.abort_request, ["POST"]),
        ):
            self.router.add_api_route(path, answer, methods=methods)

    async def generate(self, request: Request) -> Response:
        """`POST /generate`: samples of one prompt or of a list, whole or as server-sent events."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = generate_body(with_headers(request, fields))
        try:
            return await self._generated(request, body)
        except BusError as error:
            raise by_body(error) from error

    async def _generated(self, request: Request, body: GenerateBody) -> Response:
        prompts = prompts_of(body, self._tokenizer)
        if body.stream:
            if prompts.is_batch:
                message = "a stream is of one sample: send one prompt, with n = 1"
                raise Refused(bad_request("stream", message))
            return await EventStream.of(request, self._pieces(body, prompts), _told)
        replies = await while_connected(request, self._whole(body, prompts))
        runs = [run for reply in replies for run in reply["meta_info"]["weight_versions"]]
        return as_json(replies if prompts.is_batch else replies[0], headers=version_headers(runs))

    async def _whole(self, body: GenerateBody, prompts: Prompts) -> list[Json]:
        self._take_names(prompts)
        try:
            rollouts = await sampled(
                self._client,
                prompts.tokens,
                prompts.sampling,
                prompts.n,
                prompts.options,
                on_rids=lambda rids: self._note(prompts, rids),
            )
        finally:
            self._forget(prompts)
        return [
            reply_of(rollout, body, prompts, self._tokenizer, _name(prompts, row))
            for row, rollout in enumerate(rollouts)
        ]

    async def _pieces(self, body: GenerateBody, prompts: Prompts) -> AsyncGenerator[Json]:
        """All tokens so far, again and again, as SGLang tells them; the last one is whole."""
        name = _name(prompts, 0)
        tokens: list[int] = []
        self._take_names(prompts)
        stream = self._client.stream(prompts.tokens[0], prompts.sampling, **prompts.options)
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._note(prompts, [delta.rid])
                    tokens[delta.start :] = delta.tokens.tolist()
                    if delta.rollout is None:
                        yield self._piece(delta, tokens, prompts, name)
                    else:
                        yield reply_of(delta.rollout, body, prompts, self._tokenizer, name)
        except RolloutCancelled as error:
            yield reply_of(error.partial, body, prompts, self._tokenizer, name)
        finally:
            self._forget(prompts)

    def _piece(self, delta: Delta, tokens: list[int], prompts: Prompts, name: str) -> Json:
        meta: Json = {
            "id": name or delta.rid,
            "finish_reason": None,
            "completion_tokens": len(tokens),
            "weight_version": str(delta.version),
        }
        piece: Json = {"output_ids": list(tokens), "meta_info": meta}
        if self._tokenizer is not None:
            piece = {"text": text_of(list(tokens), prompts, self._tokenizer), **piece}
        return piece

    async def abort_request(self, request: Request) -> Response:
        """`POST /abort_request`: ends requests of this gateway; they answer what they have."""
        body = await body_of(request, self._settings.max_body_bytes)
        check_fields(body, ("rid", "abort_all"))
        if body.get("abort_all"):
            return as_json({"aborted": await self._client.abort()})
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            raise Refused(bad_request("rid", "name a request, or say `abort_all`"))
        known = self._rids.get(rid, [])
        return as_json({"aborted": await self._client.abort(known) if known else 0})

    def _take_names(self, prompts: Prompts) -> None:
        """Raises Refused: a request under way has one of them."""
        for name in prompts.names:
            if name in self._rids or prompts.names.count(name) > 1:
                message = f"a request {name[:64]!r} is under way; give this one another name"
                raise Refused(Problem("duplicate_rid", message, "not_started", field="rid"))
        self._rids.update({name: [] for name in prompts.names})

    def _note(self, prompts: Prompts, rids: list[str]) -> None:
        for i, name in enumerate(prompts.names):
            self._rids[name] = rids[i * prompts.n : (i + 1) * prompts.n]

    def _forget(self, prompts: Prompts) -> None:
        for name in prompts.names:
            self._rids.pop(name, None)


def _name(prompts: Prompts, row: int) -> str:
    return prompts.names[row // prompts.n] if prompts.names else ""


def _told(error: BusError) -> Json:
    return openai_error(by_body(error))
