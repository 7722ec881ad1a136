"""Control of chosen workers: `/v1/rl/*`, with the requests and replies of SMG's RL plane."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.bus.wire.messages.control import FleetStatus, ServerFacts, WorkerStatus
from rolloutbus.gateway.engine_routes import READS, check_query, engine_route
from rolloutbus.gateway.exchange import Json, as_json, body_of, while_connected
from rolloutbus.gateway.models import DEFAULT_POLICY
from rolloutbus.gateway.problems import headers_of, status_of
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult

PROTOCOL_VERSION = 1
"""Of the replies; SMG raises it when they change incompatibly."""
FACTS_DEADLINE_S = 3.0
"""How long a list of workers waits for facts that only engines know."""
SELECTABLE = ("id", "engine", "policy", "model_id", "health", "control", "weight_version")
"""Fields of a worker's row that a selector may name."""


class SelectionError(Exception):
    """The request chooses no worker, or cannot be understood; it has a stable code."""

    def __init__(
        self, code: str, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def response(self) -> Response:
        """In the dialect of `/v1/rl`."""
        return as_json({"error": self.code, "message": str(self)}, self.status)


class FleetApi:
    """Answers `/v1/rl/*` through a client of the bus."""

    def __init__(self, client: RolloutClient, settings: GatewaySettings) -> None:
        self._client = client
        self._settings = settings
        self.router = APIRouter(prefix="/v1/rl")
        for path, answer, methods in (
            ("/workers", self.workers, ["GET"]),
            ("/workers/{worker}", self.worker, ["GET"]),
            ("/workers/{worker}/engine/{path:path}", self.call, ["GET", "POST"]),
            ("/engine/{path:path}", self.fanout, ["GET", "POST"]),
        ):
            self.router.add_api_route(path, _in_dialect(answer), methods=methods)

    async def workers(self, request: Request) -> Response:
        """`GET /v1/rl/workers`: every worker, its engine and the version it attests."""
        check_query(request)
        rows = await while_connected(request, self._rows())
        return as_json({"protocol_version": PROTOCOL_VERSION, "workers": rows})

    async def worker(self, request: Request) -> Response:
        """`GET /v1/rl/workers/{id}`: one of them."""
        rows = await while_connected(request, self._rows())
        return as_json(_row_of(rows, request.path_params["worker"]))

    async def call(self, request: Request) -> Response:
        """`POST /v1/rl/workers/{id}/engine/{path}`: sends one worker a command; GET asks it.

        The reply has the status that the worker's own answer would have over HTTP.
        """
        check_query(request)
        name = request.path_params["worker"]
        row = _row_of(await self._rows(with_facts=False), name)
        outcomes = await while_connected(request, self._sent(request, [row["id"]]))
        outcome = outcomes[name]
        return as_json({"worker_id": name, **outcome}, outcome["status"])

    async def fanout(self, request: Request) -> Response:
        """`POST /v1/rl/engine/{path}?selector=…`: sends the selected workers a command; GET asks.

        207 if some did not do it; they stand in `failed`. All workers at once are the fleet: a
        pause then holds for workers that join later, too.
        """
        check_query(request, "selector")
        rows = await self._rows(with_facts=False)
        chosen = selected(rows, request.query_params.get("selector", ""))
        names = [row["id"] for row in chosen]
        is_fleet = len(chosen) == len(rows)
        outcomes = await while_connected(request, self._sent(request, names, is_fleet=is_fleet))
        results = {name: each for name, each in outcomes.items() if each["status"] < 400}  # noqa: PLR2004
        failed = [
            {
                "worker_id": name,
                "url": each["url"],
                "status": each["status"],
                "error": each["body"]["error"],
                "message": each["body"]["message"],
            }
            for name, each in outcomes.items()
            if name not in results
        ]
        content = {
            "results": results,
            "failed": failed,
            "total": len(outcomes),
            "succeeded": len(results),
        }
        return as_json(content, HTTPStatus.MULTI_STATUS if failed else HTTPStatus.OK)

    async def _sent(
        self, request: Request, names: Sequence[str], *, is_fleet: bool = False
    ) -> dict[str, Json]:
        """Returns each chosen worker's outcome, after all have answered."""
        path = request.path_params["path"].strip("/")
        send = engine_route(path)
        if request.method == "GET" and path not in READS:  # no link may pause a worker
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)
        body = await body_of(request, self._settings.max_body_bytes)
        begun = time.monotonic()
        targets = [FLEET] if is_fleet else names
        results = await asyncio.gather(*(send(self._client, body, each) for each in targets))
        latency_ms = round(1e3 * (time.monotonic() - begun))
        outcomes = {
            name: _outcome(name, each, latency_ms)
            for result in results
            for name, each in _ended(result).items()
        }
        for name in names:  # it left meanwhile, and nobody answered for it
            outcomes.setdefault(name, _outcome(name, None, latency_ms))
        return outcomes

    async def _rows(self, *, with_facts: bool = True) -> list[Json]:
        if not with_facts:
            return self._table(await self._client.status(), {})
        status, facts = await asyncio.gather(
            self._client.status(),
            self._client.server_info(deadline_s=FACTS_DEADLINE_S, check=False),
        )
        return self._table(status, facts.by_worker)

    def _table(self, status: FleetStatus, facts: Mapping[str, Any]) -> list[Json]:
        return [
            self._row(status, each, facts.get(each.name))
            for each in sorted(status.workers, key=lambda each: each.name)
        ]

    def _row(self, status: FleetStatus, worker: WorkerStatus, facts: object) -> Json:
        known = facts if isinstance(facts, ServerFacts) else None
        parallel = known.parallel if known else {}
        is_default = worker.policy == DEFAULT_POLICY
        is_paused = bool(status.paused.get(worker.name, status.pause))
        address = f"worker:{worker.name}"
        return {
            "id": worker.name,
            "url": address,
            "base_url": address,
            "engine": worker.engine,
            "engine_version": known.software.get(worker.engine) if known else None,
            "model_id": self._settings.served_names[0] if is_default else worker.policy,
            "worker_type": "regular",
            "connection_mode": "bus",
            "tp_size": parallel.get("tp"),
            "dp_size": parallel.get("dp"),
            "pp_size": parallel.get("pp"),
            "dp_ranks": parallel.get("dp", 1),
            "role": None,
            "health": "not_ready" if worker.blocked_by else "ready",
            "weight_version": str(worker.version),
            "version_source": "attested",
            "control": "asleep" if known and known.asleep else "paused" if is_paused else "active",
            "labels": {"policy": worker.policy},
            "policy": worker.policy,
            "blocked_by": worker.blocked_by,
            "capabilities": {},
        }


def selected(rows: Sequence[Json], selector: str) -> list[Json]:
    """Returns the workers that a selector chooses.

    Args:
        rows: of all workers.
        selector: `FIELD=VALUE` or `FIELD!=VALUE`, several separated by commas: all must hold.

    Raises:
        SelectionError: it is empty, has another form, or no worker matches.
    """
    if not selector.strip():
        message = "say which workers: ?selector=engine=NAME, id=NAME, policy=NAME"
        raise SelectionError("selector_required", message)
    chosen = list(rows)
    for term in selector.split(","):
        name, sign, value = term.partition("=")
        is_not = name.endswith("!")
        field = name.removesuffix("!").strip()
        if not sign or field not in SELECTABLE:
            message = f"{term[:64]!r} is not FIELD=VALUE with a field of {', '.join(SELECTABLE)}"
            raise SelectionError("invalid_selector", message)
        chosen = [row for row in chosen if (row[field] == value.strip()) != is_not]
    if not chosen:
        raise SelectionError("no_workers_match", f"no worker matches {selector[:200]!r}")
    return chosen


def _row_of(rows: Sequence[Json], name: str) -> Json:
    for row in rows:
        if row["id"] == name:
            return row
    names = ", ".join(row["id"] for row in rows) or "none"
    message = f"there is no worker {name[:64]!r}; there are {names}"
    raise SelectionError("worker_not_found", message, HTTPStatus.NOT_FOUND)


def _ended(result: FleetResult) -> dict[str, msgspec.Struct | BusError | None]:
    """None: it did not answer."""
    return {**result.by_worker, **dict.fromkeys(result.silent)}


def _outcome(name: str, ended: msgspec.Struct | BusError | None, latency_ms: int) -> Json:
    outcome: Json = {"url": f"worker:{name}", "latency_ms": latency_ms}
    if ended is None:
        message = "it did not answer: it was late, lost, or left"
        body = {"error": "upstream_timeout", "message": message}
        return {**outcome, "status": HTTPStatus.GATEWAY_TIMEOUT, "body": body}
    if isinstance(ended, BusError):
        return {**outcome, "status": status_of(ended), "body": _error_body(ended)}
    return {**outcome, "status": HTTPStatus.OK, "body": msgspec.to_builtins(ended)}


def _error_body(error: BusError) -> Json:
    if isinstance(error, RequestError):
        return {"error": error.code, "message": error.problem.message, "field": error.field}
    return {"error": "bus_error", "message": str(error)}


def _in_dialect(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Returns `answer` with errors of the bus as `{"error": CODE, "message": …}`."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except SelectionError as error:
            return error.response()
        except BusError as error:
            response = as_json(_error_body(error), status_of(error))
            response.headers.update(headers_of(error))
            return response

    return answered
