"""HTTP requests, counted, timed and logged as they pass: an ASGI middleware and its metrics."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import cast

from prometheus_client import Metric
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolloutbus.bus.actor.json_log import JsonLog, caller, child_of, place_of
from rolloutbus.bus.wire.durations import DurationCounter
from rolloutbus.gateway.fleet_metrics import counter, gauge, histogram
from rolloutbus.gateway.headers import header_in

ENDPOINT = ("endpoint",)
LOGGED = {"x-request-id": "request_id", "x-session-id": "session"}
"""Header of a request -> field of its line in the log."""
UNKNOWN = "unknown"
"""The endpoint of paths that there are none for: they are callers' to choose."""


class Traffic:
    """What passed since the gateway started."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """`clock`: monotonic, seconds."""
        self.now = clock
        self.n_open = 0
        self.answers: Counter[tuple[str, str]] = Counter()
        """(endpoint, status) -> how many."""
        self.durations: defaultdict[str, DurationCounter] = defaultdict(DurationCounter)
        self.first_events: defaultdict[str, DurationCounter] = defaultdict(DurationCounter)

    def families(self) -> Iterator[Metric]:
        """As Prometheus has them."""
        yield gauge(
            "gateway_open_requests", "HTTP requests under way.", (), [((), float(self.n_open))]
        )
        yield counter(
            "gateway_requests",
            "HTTP requests answered; code 499: the client left before its answer.",
            ("endpoint", "code"),
            self.answers.items(),
        )
        yield histogram(
            "gateway_request_duration_seconds",
            "Time from an HTTP request to the end of its answer.",
            ENDPOINT,
            [((name,), each.counted()) for name, each in self.durations.items()],
        )
        yield histogram(
            "gateway_time_to_first_token_seconds",
            "Time from an HTTP request for a stream to its first event.",
            ENDPOINT,
            [((name,), each.counted()) for name, each in self.first_events.items()],
        )


class CountTraffic:
    """Middleware: passes everything on, notes it in a `Traffic`, and writes it to a log."""

    def __init__(self, app: ASGIApp, traffic: Traffic, log: JsonLog | None = None) -> None:
        """`log`: gets a line for each HTTP request that has ended."""
        self._app = app
        self._traffic = traffic
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._traffic, scope, send)
        self._traffic.n_open += 1
        try:
            if self._log is None:
                await self._app(scope, receive, exchange.send)
            else:
                await self._logged(self._log, exchange, scope, receive)
        finally:
            exchange.ended()

    async def _logged(
        self, log: JsonLog, exchange: "_Exchange", scope: Scope, receive: Receive
    ) -> None:
        above = header_in(scope, b"traceparent") or ""
        traceparent = child_of(above)
        caller.set(traceparent)  # the client's requests, in this task, are below it
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            log.write("info", "http request", exchange.logged() | place_of(traceparent, above))


class _Exchange:
    """One request, and what is sent for it."""

    def __init__(self, traffic: Traffic, scope: Scope, send: Send) -> None:
        self._traffic = traffic
        self._scope = scope
        self._send = send
        self._began_at = traffic.now()
        self._code = 499  # nothing was sent: it was cut off
        self._waits_for_event = False

    async def send(self, message: Message) -> None:
        """Note what it is, and pass it on."""
        if message["type"] == "http.response.start":
            self._code = message["status"]
            headers = dict(message["headers"])
            self._waits_for_event = headers.get(b"content-type", b"").startswith(
                b"text/event-stream"
            )
        elif self._waits_for_event:
            self._waits_for_event = False
            self._traffic.first_events[self._endpoint].add(self._passed_s)
        await self._send(message)

    def ended(self) -> None:
        """Its answer is complete, or there is none."""
        traffic, endpoint = self._traffic, self._endpoint
        traffic.n_open -= 1
        traffic.answers[endpoint, str(self._code)] += 1
        traffic.durations[endpoint].add(self._passed_s)

    def logged(self) -> dict[str, object]:
        """Fields of its line in a log."""
        headers = Headers(scope=self._scope)
        return {
            "method": self._scope["method"],
            "endpoint": self._endpoint,
            "status": self._code,
            "duration_ms": round(1e3 * self._passed_s, 3),
            **{field: value for name, field in LOGGED.items() if (value := headers.get(name))},
        }

    @property
    def _passed_s(self) -> float:
        return self._traffic.now() - self._began_at

    @property
    def _endpoint(self) -> str:
        """The path that was declared: those of callers may be without number."""
        route = self._scope.get("route")
        return cast("str", getattr(route, "path", UNKNOWN))
