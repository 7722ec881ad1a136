"""SGLang's `/generate` and `/abort_request`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.gateway.engine_routes import check_fields, check_query
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
from rolloutbus.gateway.problems import openai_error
from rolloutbus.gateway.samples import CachedTokens, sampled
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.generate_body import (
    GenerateBody,
    Prompts,
    by_body,
    generate_body,
    pairs_of,
    pieces_of,
    prompts_of,
    reply_of,
)
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Delta, Rollout, RolloutCancelled
from rolloutbus.trainer_adapter.client.text import Tokenizer


class GenerationApi:
    """Answers SGLang's requests for samples through a client of the bus."""

    def __init__(
        self,
        client: RolloutClient,
        settings: GatewaySettings,
        tokenizer: Tokenizer | None,
        labels: WeightLabels,
        cached: CachedTokens,
    ) -> None:
        self._client = client
        self._settings = settings
        self._tokenizer = tokenizer
        self._labels = labels
        self._cached = cached
        self._rids: dict[str, list[str]] = {}
        """The callers' names of requests under way -> the bus's."""
        self.direct = [DirectRoute("/generate", self.generate, "POST", "PUT")]
        self.router = APIRouter()
        self.router.add_api_route("/abort_request", self.abort_request, methods=["POST"])

    async def generate(self, request: Request) -> Response:
        """`POST /generate`: samples of one prompt or of a list, whole or as server-sent events."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = generate_body(with_headers(request, fields))
        try:
            return await self._cached.told(partial(self._generated, request, body))
        except BusError as error:
            raise by_body(error) from error

    async def _generated(self, request: Request, body: GenerateBody, want: Want) -> Response:
        prompts = prompts_of(body, self._tokenizer, tells_cached=want.cached_tokens)
        if body.stream:
            if prompts.is_batch:
                message = "a stream is of one sample: send one prompt, with n = 1"
                raise Refused(bad_request("stream", message))
            return await EventStream.of(request, self._pieces(body, prompts), _told)
        replies = await while_connected(request, self._whole(body, prompts))
        told = [reply["meta_info"] for reply in replies]
        request.scope[IS_CUT] = any(each["finish_reason"]["type"] == "abort" for each in told)
        runs = [run for each in told for run in each["weight_versions"]]
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
        return [self._reply(rollout, body, prompts, row) for row, rollout in enumerate(rollouts)]

    async def _pieces(self, body: GenerateBody, prompts: Prompts) -> AsyncGenerator[Json]:
        """All tokens so far, again and again, as SGLang tells them; the last one is whole."""
        tokens: list[int] = []
        logprobs: list[float] = []
        texts = None if self._tokenizer is None else pieces_of(prompts, self._tokenizer)
        self._take_names(prompts)
        stream = self._client.stream(prompts.tokens[0], prompts.sampling, **prompts.options)
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._note(prompts, [delta.rid])
                    tokens[delta.start :] = delta.tokens.tolist()
                    logprobs[delta.start :] = delta.logprobs.tolist()
                    if delta.rollout is None:
                        piece = self._piece(delta, tokens, body, prompts)
                        if texts is not None:
                            texts.add(delta.start, delta.tokens.tolist(), is_last=False)
                        if body.return_logprob:
                            pairs = pairs_of(np.array(logprobs), tokens)
                            piece["meta_info"]["output_token_logprobs"] = pairs
                        yield piece if texts is None else {"text": texts.text, **piece}
                    else:
                        yield self._reply(delta.rollout, body, prompts, 0)
        except RolloutCancelled as error:
            yield self._reply(error.partial, body, prompts, 0)
        finally:
            self._forget(prompts)

    def _piece(self, delta: Delta, tokens: list[int], body: GenerateBody, prompts: Prompts) -> Json:
        meta: Json = {
            "id": prompts.name_of(0) or delta.rid,
            "finish_reason": None,
            "prompt_tokens": len(prompts.tokens[0]),
            "completion_tokens": len(tokens),
            "weight_version": self._labels.label_of(body.policy or "default", delta.version),
        }
        return {"output_ids": list(tokens), "meta_info": meta}

    def _reply(self, rollout: Rollout, body: GenerateBody, prompts: Prompts, row: int) -> Json:
        reply = reply_of(rollout, body, prompts, self._tokenizer, row)
        newest = rollout.version_runs[-1][0] if rollout.version_runs else None
        policy = body.policy or "default"
        reply["meta_info"]["weight_version"] = (
            None if newest is None else self._labels.label_of(policy, newest)
        )
        return reply

    async def abort_request(self, request: Request) -> Response:
        """`POST /abort_request`: ends requests of this gateway; they answer what they have."""
        check_query(request)
        body = await body_of(request, self._settings.max_body_bytes)
        check_fields(body, ("rid", "abort_all"))
        is_all = body.get("abort_all", False)
        if not isinstance(is_all, bool):
            raise Refused(bad_request("abort_all", "it is true or false"))
        if is_all:
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


def _told(error: BusError) -> Json:
    return openai_error(by_body(error))
