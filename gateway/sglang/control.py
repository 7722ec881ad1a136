"""SGLang's control of an engine, for the fleet as if it were one: pauses, memory, health, load."""

from http import HTTPStatus
from math import prod

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.gateway.engine_routes import ENGINE_ROUTES, check_query
from rolloutbus.gateway.exchange import Json, as_json, body_of, while_connected
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.sglang.replies import telling_success
from rolloutbus.gateway.trainer_groups import TrainerGroups
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.client.engine_gauges import cache_used, loads_of

HEALTH_DEADLINE_S = 20.0
STATUS_DEADLINE_S = 3.0
"""Of a look at the fleet's health: a router that does not answer is none."""
LOADS_DEADLINE_S = 3.0
SPLITS = ("tp", "pp", "dp")
"""What multiplies the ranks of an engine."""
SENTENCES = {
    "pause_generation": "Generation paused successfully.",
    "continue_generation": "Generation continued successfully.",
    "release_memory_occupation": "Memory released.",
    "resume_memory_occupation": "Memory taken back.",
}
"""Engine route -> what its answer says."""
HOW_WORKERS_JOIN = (
    "nobody adds or removes a worker of the bus by URL, it joins by itself: start it with the "
    "router's address (rolloutbus worker), or bring up more of them (rolloutbus up -n N)"
)
LOAD_PARTS = frozenset({"all", "core", "memory", "spec", "lora", "disagg", "queues"})
"""Which figures SGLang is asked for."""
THIS = "gateway"
"""Id of the one server that a router of SGLang would have here: the fleet, as this gateway."""


class ControlApi:
    """Answers SGLang's commands to an engine through a client of the bus."""

    def __init__(
        self,
        client: RolloutClient,
        settings: GatewaySettings,
        labels: WeightLabels,
        groups: TrainerGroups,
    ) -> None:
        self._client = client
        self._settings = settings
        self._labels = labels
        self._groups = groups
        self.router = APIRouter()
        for path, answer, methods in (
            *((f"/{name}", telling_success(self.command), ["POST"]) for name in SENTENCES),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
            ("/health", self.health, ["GET", "HEAD"]),
            ("/health_generate", self.health_generate, ["GET"]),
            ("/server_info", self.server_info, ["GET"]),
            ("/get_server_info", self.server_info, ["GET"]),
            ("/model_info", self.model_info, ["GET"]),
            ("/get_model_info", self.model_info, ["GET"]),
            ("/get_weight_version", self.weight_version, ["GET"]),
            ("/weight_version", self.weight_version, ["GET"]),
            ("/list_workers", self.list_workers, ["GET"]),
            ("/workers", self.servers, ["GET"]),
            ("/workers", self.register, ["POST"]),
            ("/workers/{server}", self.add_worker, ["DELETE"]),
            ("/add_worker", self.add_worker, ["POST"]),
            ("/remove_worker", self.add_worker, ["POST"]),
            ("/v1/loads", self.loads, ["GET"]),
            ("/get_load", self.get_load, ["GET"]),
        ):
            self.router.add_api_route(path, answer, methods=methods)

    async def command(self, request: Request) -> Response:
        """`POST /pause_generation` and others: a command to the whole fleet; all must do it."""
        name = request.url.path.strip("/")
        if name == "continue_generation":
            self._groups.require_none_open()
        body, result = await self._sent(name, request)
        if name == "pause_generation" and body.get("mode", "abort") == "abort":
            await self._client.abort()  # others' requests wait; here callers want what there is
        told = {"message": SENTENCES[name], "status": "ok", "success": True}
        return as_json({**told, "workers": list(result.by_worker)})

    async def flush_cache(self, request: Request) -> Response:
        """`POST /flush_cache`: forgets cached prefixes that no request uses."""
        await self._sent("flush_cache", request)
        return Response("Cache flushed.\n", media_type="text/plain")

    async def _sent(self, name: str, request: Request) -> tuple[Json, FleetResult]:
        check_query(request)
        body = await body_of(request, self._settings.max_body_bytes)
        result = await ENGINE_ROUTES[name](self._client, body, FLEET)
        result.check()
        return body, result

    async def health(self) -> Response:
        """`GET /health`: 200 if the router answers and some worker takes requests; else 503."""
        status = await self._client.status(deadline_s=STATUS_DEADLINE_S)
        ready = [each.name for each in status.workers if not each.blocked_by]
        content = {"status": "ok" if ready else "no worker takes requests", "ready": len(ready)}
        return as_json(content, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def health_generate(self, request: Request) -> Response:
        """`GET /health_generate`: 200 once a worker has sampled a token; 503 as `/health`."""
        told = await self.health()
        if told.status_code != HTTPStatus.OK:  # what is sampled would wait, and the caller with it
            return told
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        work = self._client.generate([0], sampling, deadline_s=HEALTH_DEADLINE_S)
        rollout = await while_connected(request, work)
        return as_json({"status": "ok", "worker": rollout.worker})

    async def server_info(self) -> Response:
        """`GET /server_info`: facts and counters of each worker's engine, and how it is split."""
        result = await self._client.server_info(check=False)
        return as_json({**_split(result), "workers": _by_worker(result), "silent": result.silent})

    async def model_info(self) -> Response:
        """`GET /model_info`: the served name and the committed weight version of each policy."""
        status = await self._client.status()
        versions = {each.policy: 0 for each in status.workers} | status.committed
        return as_json(
            {
                "model_path": self._settings.model_path or self._settings.served_names[0],
                "is_generation": True,
                "weight_version": self._labels.label_of("default", versions.get("default", 0)),
                "weight_versions": versions,
            }
        )

    async def weight_version(self) -> Response:
        """`GET /get_weight_version`: what the trainer calls the committed version."""
        version = (await self._client.status()).committed.get("default", 0)
        return as_json({"weight_version": self._labels.label_of("default", version)})

    async def list_workers(self, request: Request) -> Response:
        """`GET /list_workers`: the router's table, and the URL at which all of it is asked."""
        status = await self._client.status()
        rows = msgspec.to_builtins(status.workers)
        return as_json({"urls": [_url_of(request)], "workers": rows})

    async def servers(self, request: Request) -> Response:
        """`GET /workers`: the servers of SGLang's router, which is one: this gateway."""
        status = await self._client.status()
        row = {
            "id": THIS,
            "url": _url_of(request),
            "model_id": self._settings.served_names[0],
            "worker_type": "regular",
            "is_healthy": any(not each.blocked_by for each in status.workers),
            "load": status.n_running,
        }
        return as_json({"workers": [row], "total": 1})

    async def register(self, request: Request) -> Response:
        """`POST /workers`: a server that is this gateway is here already; others are refused."""
        body = await body_of(request, self._settings.max_body_bytes)
        if body.get("url") != _url_of(request) or body.get("worker_type", "regular") != "regular":
            return await self.add_worker()
        return as_json({"status": "ok", "worker_id": THIS, "url": body["url"]})

    async def add_worker(self) -> Response:
        """`POST /add_worker` and others: refused, since workers come and go by themselves."""
        raise Refused(Problem("unsupported", HOW_WORKERS_JOIN, "not_started", field="url"))

    async def loads(self, request: Request) -> Response:
        """`GET /v1/loads`: what each worker has to do."""
        for name, value in request.query_params.items():
            if name != "include" or not set(value.split(",")) <= LOAD_PARTS:
                message = "every worker's load comes whole, as JSON; /metrics has it for Prometheus"
                raise Refused(Problem("unsupported", message, "not_started", field=name[:64]))
        rows, n_queued = await while_connected(request, self._loads())
        return as_json({"loads": rows, "num_waiting_reqs": n_queued})

    async def get_load(self, request: Request) -> Response:
        """`GET /get_load`: the same in SGLang's former shape, one row for each worker."""
        rows, _ = await while_connected(request, self._loads())
        return as_json(
            [
                {
                    "dp_rank": row["dp_rank"],
                    "worker": row["worker"],
                    "num_reqs": row["num_running_reqs"],
                    "num_tokens": row["num_used_tokens"],
                }
                for row in rows
            ]
        )

    async def _loads(self) -> tuple[list[Json], int]:
        """A row for each worker, and how many requests wait in the router."""
        status = await self._client.status()
        result = await self._client.get_load(deadline_s=LOADS_DEADLINE_S, check=False)
        gauges = loads_of(result)
        rows: list[Json] = []
        for rank, each in enumerate(sorted(status.workers, key=lambda each: each.name)):
            row: Json = {
                "dp_rank": rank,
                "worker": each.name,
                "num_running_reqs": each.n_running,
                "num_used_tokens": each.n_tokens,
                "max_running_requests": each.slots,
                "token_usage": cache_used(gauges.get(each.name, {})),
                "gauges": gauges.get(each.name),
            }
            rows.append(row)
        return rows, status.n_queued


def _url_of(request: Request) -> str:
    """Where the caller found this gateway."""
    return str(request.base_url).rstrip("/")


def _split(result: FleetResult) -> Json:
    """Over how many ranks: all engines together, and each of them, where they are alike."""
    found = [each.parallel for each in result.by_worker.values() if isinstance(each, ServerFacts)]
    told: Json = {"num_gpus": sum(prod(each.get(kind, 1) for kind in SPLITS) for each in found)}
    for kind in SPLITS:
        sizes = {each.get(kind, 1) for each in found}
        if len(sizes) == 1:
            told[f"{kind}_size"] = sizes.pop()
    return told


def _by_worker(result: FleetResult) -> Json:
    return {
        name: {"error": str(each)} if isinstance(each, BaseException) else msgspec.to_builtins(each)
        for name, each in result.by_worker.items()
    }
