"""The gateway's HTTP application: all endpoints, and errors in OpenAI's shape."""

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.gateway.exchange import BodyTooLarge, ClientLeft, as_json
from rolloutbus.gateway.fleet_api import FleetApi
from rolloutbus.gateway.live.api import LiveApi
from rolloutbus.gateway.live.open_page import OpenPages
from rolloutbus.gateway.metrics_api import MetricsApi
from rolloutbus.gateway.openai_api import OpenAIApi
from rolloutbus.gateway.problems import error_body, headers_of, openai_error, status_of
from rolloutbus.gateway.repeats import OncePerRequestId
from rolloutbus.gateway.samples import CachedTokens
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.adapters import AdaptersApi
from rolloutbus.gateway.sglang.control import ControlApi
from rolloutbus.gateway.sglang.distributed import DistributedApi
from rolloutbus.gateway.sglang.generation import GenerationApi
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.sglang.update_steps import UpdateStepsApi
from rolloutbus.gateway.sglang.updates import UpdatesApi
from rolloutbus.gateway.sglang.weights import WeightsApi
from rolloutbus.gateway.skyrl.api import SkyRLApi
from rolloutbus.gateway.skyrl.weights import SkyRLWeightsApi
from rolloutbus.gateway.traffic import Traffic
from rolloutbus.gateway.trainer_groups import TrainerGroups
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer
from rolloutbus.trainer_adapter.openai.sglang_reader import SglangParsers

CLIENT_LEFT = 499
"""A status that nobody reads, as other servers log it."""


def gateway_app(
    client: RolloutClient,
    settings: GatewaySettings,
    tokenizer: ChatTokenizer | None = None,
    traffic: Traffic | None = None,
    parsers: SglangParsers | None = None,
    *,
    pages: OpenPages | None = None,
    labels: WeightLabels | None = None,
    groups: TrainerGroups | None = None,
) -> FastAPI:
    """An ASGI application that answers through `client`.

    Args:
        client: connected for as long as the application runs; nothing else should use it, because
            `abort_all` and a pause end all that it samples.
        settings: see there.
        tokenizer: of transformers; None: token ids only.
        traffic: what `/metrics` tells of HTTP; None: nothing. Whoever serves counts it.
        parsers: SGLang's, which read answers; None: transformers reads them.
        pages: that are open at this gateway; None: at this application only.
        labels: what trainers call versions; None: those of this application only.
        groups: of trainers, which whoever serves closes at the end; None: joins private ones.
    """
    groups = groups or TrainerGroups(client)
    app = FastAPI(title="rolloutbus", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = MetricsApi(client, traffic or Traffic())
    if not settings.only_metrics:
        labels = labels or WeightLabels()
        cached = CachedTokens(client)
        openai = OpenAIApi(client, settings, tokenizer, parsers, cached)
        generation = GenerationApi(client, settings, tokenizer, labels, cached)
        skyrl = SkyRLApi(client, settings, tokenizer, groups)
        # Routes are tried in order: those that are asked most come first.
        app.router.routes[:0] = [*generation.direct, *openai.direct, *skyrl.direct]
        app.include_router(openai.router)
        app.include_router(generation.router)
        app.include_router(ControlApi(client, settings, labels, groups).router)
        app.include_router(DistributedApi(client, settings, labels, groups).router)
        app.include_router(UpdatesApi(client, settings, labels).router)
        app.include_router(UpdateStepsApi(client, settings, labels).router)
        app.include_router(WeightsApi(client, settings).router)
        app.include_router(AdaptersApi(client, settings).router)
        app.include_router(skyrl.router)
        app.include_router(SkyRLWeightsApi(settings, groups).router)
        app.include_router(FleetApi(client, settings).router)
        app.include_router(LiveApi(client, tokenizer, pages or OpenPages()).router)
    app.include_router(metrics.router)
    app.add_middleware(OncePerRequestId, max_body_bytes=settings.max_body_bytes)
    app.add_exception_handler(BusError, _on_bus_error)
    app.add_exception_handler(BodyTooLarge, _on_too_large)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    return app


def error_response(error: BusError) -> Response:
    """An error of the bus as HTTP."""
    response = as_json(openai_error(error), status_of(error))
    response.headers.update(headers_of(error))
    return response


async def _on_bus_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, BusError), "it is registered for these"
    return error_response(error)


async def _on_too_large(_: Request, error: Exception) -> Response:
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    response = as_json(error_body(status, str(error)), status)
    response.headers["Connection"] = "close"  # the rest of the body is not read
    return response


async def _on_client_left(_: Request, error: Exception) -> Response:
    del error
    return Response(status_code=CLIENT_LEFT)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path[:100]}: {status.phrase.lower()}"
    response = as_json(error_body(status, message), status)
    response.headers.update(error.headers or {})
    return response


async def _on_fault(_: Request, error: Exception) -> Response:
    """Ours: the server logs its traceback."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    message = f"a fault of the gateway itself, {type(error).__name__}; its log has the traceback"
    return as_json(error_body(status, message, code="internal"), status)
