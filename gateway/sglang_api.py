"""SGLang's endpoints: `/generate`, and control of the fleet as if it were one engine."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.gateway.exchange import EventStream, Json, as_json, body_of, while_connected
from rolloutbus.gateway.generate_body import (
    GenerateBody,
    Prompts,
    by_body,
    generate_body,
    prompts_of,
    reply_of,
)
from rolloutbus.gateway.headers import version_headers, with_headers
from rolloutbus.gateway.problems import openai_error
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.trainer_adapter.client.asks import ask_of, deadline_of, row_seed
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import (
    Delta,
    FleetResult,
    Rollout,
    RolloutCancelled,
    rollout_in,
)
from rolloutbus.trainer_adapter.client.text import Tokenizer

PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
HEALTH_DEADLINE_S = 20.0
STATUS_DEADLINE_S = 3.0
"""Of a look at the fleet's health: a router that does not answer is none."""
SLOW_S = 120.0
"""Deadline of commands that wait for running requests or move memory."""


class SGLangApi:
    """Answers SGLang's requests through a client of the bus."""

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
            ("/pause_generation", self.pause_generation, ["POST"]),
            ("/continue_generation", self.continue_generation, ["POST"]),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
            ("/release_memory_occupation", self.release_memory, ["POST"]),
            ("/resume_memory_occupation", self.resume_memory, ["POST"]),
            ("/health", self.health, ["GET"]),
            ("/health_generate", self.health_generate, ["GET"]),
            ("/server_info", self.server_info, ["GET"]),
            ("/get_server_info", self.server_info, ["GET"]),
            ("/model_info", self.model_info, ["GET"]),
            ("/get_model_info", self.model_info, ["GET"]),
            ("/list_workers", self.list_workers, ["GET"]),
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
        connection = self._client.connection
        deadline_s = deadline_of(prompts.options)
        rids: list[str] = []
        self._take_names(prompts)
        try:
            futures: list[asyncio.Future[Any]] = []
            for row, tokens in enumerate(
                tokens for tokens in prompts.tokens for _ in range(prompts.n)
            ):
                ask = ask_of(tokens, _of_row(prompts.sampling, row), **prompts.options)
                rid, future = connection.submit(ask, deadline_s)
                rids.append(rid)
                futures.append(future)
            self._note(prompts, rids)
            results = await asyncio.gather(*futures, return_exceptions=True)
        finally:
            self._forget(prompts)
            for rid in rids:
                connection.forget(rid)
        return [
            reply_of(_rollout_in(result), body, prompts, self._tokenizer, _name(prompts, row))
            for row, result in enumerate(results)
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
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=prompts.skip_special)
            piece = {"text": str(text), **piece}
        return piece

    async def abort_request(self, request: Request) -> Response:
        """`POST /abort_request`: ends requests of this gateway; they answer what they have."""
        body = await body_of(request, self._settings.max_body_bytes)
        _check_fields(body, ("rid", "abort_all"))
        if body.get("abort_all"):
            return as_json({"aborted": await self._client.abort()})
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            raise Refused(bad_request("rid", "name a request, or say `abort_all`"))
        known = self._rids.get(rid, [])
        return as_json({"aborted": await self._client.abort(known) if known else 0})

    async def pause_generation(self, request: Request) -> Response:
        """`POST /pause_generation`: the fleet samples nothing until `/continue_generation`."""
        body = await body_of(request, self._settings.max_body_bytes)
        _check_fields(body, ("mode",))
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise Refused(bad_request("mode", f"a mode is one of {', '.join(PAUSE_MODES)}"))
        result = await self._client.pause(mode, deadline_s=SLOW_S)
        if mode == "abort":  # others' requests wait; here their callers want what there is
            await self._client.abort()
        return as_json(_done("Generation paused successfully.", result))

    async def continue_generation(self, request: Request) -> Response:
        """`POST /continue_generation`: ends the pause."""
        body = await body_of(request, self._settings.max_body_bytes)
        _check_fields(body, ("torch_empty_cache",))
        result = await self._client.resume(deadline_s=SLOW_S)
        return as_json(_done("Generation continued successfully.", result))

    async def flush_cache(self) -> Response:
        """`POST /flush_cache`: forgets cached prefixes that no request uses."""
        await self._client.flush_cache(deadline_s=SLOW_S)
        return Response("Cache flushed.\n", media_type="text/plain")

    async def release_memory(self, request: Request) -> Response:
        """`POST /release_memory_occupation`: releases engine memory; the fleet must be idle."""
        result = await self._client.sleep(await self._tags(request), deadline_s=SLOW_S)
        return as_json(_done("Memory released.", result))

    async def resume_memory(self, request: Request) -> Response:
        """`POST /resume_memory_occupation`: takes released memory back."""
        result = await self._client.wake_up(await self._tags(request), deadline_s=SLOW_S)
        return as_json(_done("Memory taken back.", result))

    async def health(self) -> Response:
        """`GET /health`: 200 if the router answers and some worker takes requests; else 503."""
        status = await self._client.status(deadline_s=STATUS_DEADLINE_S)
        ready = [each.name for each in status.workers if not each.blocked_by]
        content = {"status": "ok" if ready else "no worker takes requests", "ready": len(ready)}
        return as_json(content, 200 if ready else 503)

    async def health_generate(self, request: Request) -> Response:
        """`GET /health_generate`: 200 once a worker has sampled a token."""
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        work = self._client.generate([0], sampling, deadline_s=HEALTH_DEADLINE_S)
        rollout = await while_connected(request, work)
        return as_json({"status": "ok", "worker": rollout.worker})

    async def server_info(self) -> Response:
        """`GET /server_info`: facts and counters of each worker's engine."""
        result = await self._client.server_info(check=False)
        return as_json({"workers": _by_worker(result), "silent": result.silent})

    async def model_info(self) -> Response:
        """`GET /model_info`: the served name and the committed weight version of each policy."""
        status = await self._client.status()
        versions = {each.policy: 0 for each in status.workers} | status.committed
        return as_json(
            {
                "model_path": self._settings.model_path or self._settings.served_names[0],
                "is_generation": True,
                "weight_version": str(versions.get("default", 0)),
                "weight_versions": versions,
            }
        )

    async def list_workers(self) -> Response:
        """`GET /list_workers`: the router's table."""
        status = await self._client.status()
        return as_json({"workers": msgspec.to_builtins(status.workers)})

    async def _tags(self, request: Request) -> list[Any]:
        body = await body_of(request, self._settings.max_body_bytes)
        _check_fields(body, ("tags",))
        tags = body.get("tags")
        if tags is None:
            return ["weights", "kv_cache"]
        if not isinstance(tags, list) or not set(cast("list[Any]", tags)) <= set(MEMORY_TAGS):
            raise Refused(bad_request("tags", f"tags are a list of {', '.join(MEMORY_TAGS)}"))
        return cast("list[Any]", tags)

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


def _of_row(sampling: SamplingParams, row: int) -> SamplingParams:
    """As `RolloutClient.generate_batch` has it: no two samples draw alike."""
    if sampling.sampling_seed is None:
        return sampling
    return msgspec.structs.replace(sampling, sampling_seed=row_seed(sampling.sampling_seed, row))


def _rollout_in(result: Any) -> Rollout:  # noqa: ANN401 - a result of any command, or its error
    """An aborted request answers what it has."""
    if isinstance(result, RolloutCancelled):
        return result.partial
    if isinstance(result, BaseException):
        raise result
    return rollout_in(result)


def _name(prompts: Prompts, row: int) -> str:
    return prompts.names[row // prompts.n] if prompts.names else ""


def _check_fields(body: Json, known: tuple[str, ...]) -> None:
    for name in body:
        if name not in known:
            message = f"there is no field {name[:64]!r} here; there are {', '.join(known)}"
            raise Refused(bad_request(name[:64], message))


def _done(message: str, result: FleetResult) -> Json:
    return {"message": message, "status": "ok", "success": True, "workers": list(result.by_worker)}


def _by_worker(result: FleetResult) -> Json:
    return {
        name: {"error": str(each)} if isinstance(each, BaseException) else msgspec.to_builtins(each)
        for name, each in result.by_worker.items()
    }


def _told(error: BusError) -> Json:
    return openai_error(by_body(error))
