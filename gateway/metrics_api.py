"""`GET /metrics`: the fleet and this gateway, for Prometheus."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.gateway.fleet_metrics import counter, fleet_families, gauge
from rolloutbus.gateway.traffic import Traffic
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.effects import ClientCounters
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges, loads_of

STATUS_S = 3.0
"""How long the router may take; Prometheus waits for 10 s unless told otherwise."""
GAUGES_S = 1.0
"""Engines that take longer have no gauges this time."""
MANY = 64
"""Of more workers the engines are not asked at each scrape: each of them is sent a command."""

CLIENT_COUNTERS = {
    "finished": "Requests and commands that ended without an error.",
    "prompt_tokens": "Tokens of the prompts of results that came.",
    "tokens": "Sampled tokens of results that came.",
    "resends": "Commands sent again because no answer came.",
    "reconnects": "Times that the connection to the router was made anew.",
    "lost": "Executions that were lost with their worker.",
    "resumed": "Requests sent again with the tokens that were held.",
    "retried": "Requests sent again from the start.",
    "deferred": "Requests sent again because no worker was ready for them.",
    "stale_endings": "Endings dropped because their request or attempt had ended.",
    "stale_deltas": "Parts of streams dropped because their request or attempt had ended.",
    "duplicates": "Parts of streams that brought nothing new.",
    "gaps": "Streams that lost a part on the way.",
    "repairs": "Times that lost parts of a stream were asked for.",
    "stream_mismatches": "Requests whose streamed tokens were not those of the result.",
    "digest_mismatches": "Results whose tokens were not those that their digest was made of.",
    "sessions_moved": "Times that an open session changed its worker.",
    "sessions_lost": "Sessions whose place was gone after a reconnect.",
    "malformed_in": "Entries dropped because they break the protocol.",
    "unexpected_in": "Entries dropped because a client is never sent them.",
    "fleets_changed": "Times that another fleet answered at the router's address.",
    "held_back": "Requests that waited until the router had named its fleet.",
}
"""What the gateway's client counts."""


class MetricsApi:
    """Answers scrapes; what it says is put together at each one."""

    def __init__(self, client: RolloutClient, traffic: Traffic) -> None:
        self._client = client
        self._traffic = traffic
        self._may_ask_engines = True
        self._n_scrapes = 0
        self._gauges: Gauges = {}
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: in Prometheus' text format, or OpenMetrics' where that is asked for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        status, gauges = await self._asked()
        own = list(own_families(self._traffic, self._client.connection.counters))
        # In a thread: a large fleet has a hundred thousand lines, and streams want the loop.
        text = await asyncio.to_thread(
            lambda: encode(_Collected([*families_of(status, gauges), *own]))
        )
        return Response(text, media_type=content_type)

    async def _asked(self) -> tuple[FleetStatus | None, Gauges]:
        """What router and engines say now; None: the router does not answer."""
        try:
            status = await self._client.status(deadline_s=STATUS_S)
        except BusError:  # the gateway's own figures tell the story
            return None, {}
        await self._ask_engines(len(status.workers))
        here = {each.name for each in status.workers}
        return status, {name: each for name, each in self._gauges.items() if name in here}

    async def _ask_engines(self, n_workers: int) -> None:
        n_between = 1 + n_workers // MANY
        self._n_scrapes += 1
        if not self._may_ask_engines or (self._n_scrapes - 1) % n_between:
            return
        try:
            self._gauges = loads_of(await self._client.get_load(deadline_s=GAUGES_S, check=False))
        except Refused as refused:
            self._gauges = {}
            self._may_ask_engines = refused.code != "forbidden"
        except BusError:
            self._gauges = {}


def families_of(status: FleetStatus | None, gauges: Gauges) -> Iterator[Metric]:
    """The fleet's metrics; if its router did not answer, only that."""
    yield gauge(
        "router_up",
        "1 if the router answers. 0 if it does not: then all that it tells is absent.",
        (),
        [((), float(status is not None))],
    )
    if status is not None:
        yield from fleet_families(status, gauges)


def own_families(traffic: Traffic, counters: ClientCounters) -> Iterator[Metric]:
    """This gateway's metrics."""
    yield from traffic.families()
    for name, n in asdict(counters).items():
        sentence = f"Of this gateway as a client of the bus: {CLIENT_COUNTERS[name]}"
        yield counter(f"gateway_client_{name}", sentence, (), [((), float(n))])


class _Collected:
    """What the encoders take: a registry for one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
