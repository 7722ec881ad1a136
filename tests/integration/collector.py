"""A stand-in for an OpenTelemetry collector: takes OTLP over HTTP, and keeps what came."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.integration.live_fleet import DEADLINE_S


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    name: str
    service: str
    trace: str
    span: str
    parent: str
    about: dict[str, str]
    """Attributes without their prefix, as text."""
    events: list[str]
    links: list[str]


class Collector:
    """What has come so far."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._has_news = threading.Condition()
        self.url = ""

    def take(self, body: bytes) -> None:
        """One export."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._has_news:
            for resource in request.resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        about = {each.key: _text(each.value) for each in span.attributes}
                        self._seen.append(
                            Seen(
                                span.name,
                                named["service.name"].removeprefix("rolloutbus-"),
                                span.trace_id.hex(),
                                span.span_id.hex(),
                                span.parent_span_id.hex(),
                                {k.removeprefix("rolloutbus."): v for k, v in about.items()},
                                [event.name for event in span.events],
                                [link.span_id.hex() for link in span.links],
                            )
                        )
            self._has_news.notify_all()

    def until(self, look: Callable[[list[Seen]], bool]) -> list[Seen]:
        """Waits until what has come is enough; returns all of it."""
        with self._has_news:
            enough = self._has_news.wait_for(lambda: look(self._seen), DEADLINE_S)
            assert enough, [(each.service, each.name, each.about) for each in self._seen]
            return list(self._seen)

    def trace_with(self, rid: str, *names: str) -> list[Seen]:
        """The whole trace of a request, once it has spans of these names."""

        def of(seen: list[Seen]) -> list[Seen]:
            traces = {each.trace for each in seen if each.about.get("rid") == rid}
            return [each for each in seen if each.trace in traces]

        wanted = {name: names.count(name) for name in names}

        def is_whole(seen: list[Seen]) -> bool:
            found = [each.name for each in of(seen)]
            return all(found.count(name) >= n for name, n in wanted.items())

        return of(self.until(is_whole))


def _text(value: AnyValue) -> str:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return str(value.int_value)
        case "double_value":
            return str(value.double_value)
        case "array_value":
            return ",".join(_text(each) for each in value.array_value.values)
        case other:
            return f"a {other}"


@contextmanager
def collector() -> Generator[Collector]:
    """One at a free port."""
    running = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            running.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        running.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield running
        finally:
            server.shutdown()
            serving.join()
