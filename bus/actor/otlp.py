"""Spans of OpenTelemetry, sent to a collector by OTLP over HTTP.

Imported only where traces are on. The standard variables say where to, how much and with which
names: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES and so on.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind as Kind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.actor.spans import Attributes, Role, SpanKind
from rolloutbus.bus.wire.errors import SettingsError

LAST_SPANS_S = 2.0
"""What an ending process waits for its collector, at most."""
WARN_EVERY_S = 30.0
PREFIX = "rolloutbus."
_KINDS: dict[SpanKind, Kind] = {
    "internal": Kind.INTERNAL,
    "server": Kind.SERVER,
    "client": Kind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()
_ROOT = Context()


class OtlpSpan:
    """A span of OpenTelemetry's."""

    def __init__(self, span: trace.Span) -> None:
        self.span = span
        self._is_over = False

    @property
    def traceparent(self) -> str:
        """As W3C writes it."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def tell(self, event: str, attributes: Attributes | None = None) -> None:
        """Something happened now."""
        self.span.add_event(event, _prefixed(attributes or {}))

    def learn(self, attributes: Attributes) -> None:
        """More is known about it."""
        self.span.set_attributes(_prefixed(attributes))

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """It is over now; only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        self.span.set_attribute(f"{PREFIX}outcome", outcome)
        if is_failure:
            self.span.set_status(trace.StatusCode.ERROR, outcome)
        self.span.end()


class OtlpTracer:
    """Spans of one actor."""

    def __init__(self, tracer: trace.Tracer, actor: str) -> None:
        self._tracer = tracer
        self._actor = actor

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> OtlpSpan:
        """A span that begins now; see the port."""
        span = self._tracer.start_span(
            name,
            None if parent is None else _context_of(parent),
            _KINDS[kind],
            _prefixed({"actor": self._actor, **attributes}),
            [trace.Link(each) for link in links if (each := _named_by(link)).is_valid],
        )
        return OtlpSpan(span)


def otlp_tracer(role: Role, name: str) -> OtlpTracer:
    """What this actor tells with: by the provider that its process has, or by a new one.

    An application that uses OpenTelemetry itself has said where its traces go.

    Raises:
        SettingsError: one of the standard variables has a value that cannot be.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        provider = _new_provider(role, name)
        trace.set_tracer_provider(provider)
    return OtlpTracer(provider.get_tracer("rolloutbus"), name)


def _new_provider(role: Role, name: str) -> TracerProvider:
    known = {"service.name": f"rolloutbus-{role}", "service.instance.id": name}
    if "OTEL_SERVICE_NAME" in os.environ:  # the caller's word counts
        del known["service.name"]
    if role != "client":  # whose application has a log of its own
        logging.getLogger("opentelemetry").addHandler(_Complaints())
    try:
        provider = TracerProvider(resource=Resource.create(known), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise SettingsError(f"the OTEL_ variables cannot be used: {error}") from error
    atexit.register(_finish, provider)
    return provider


def _finish(provider: TracerProvider) -> None:
    """Sends the last spans; a collector that is gone holds nobody up."""
    sending = threading.Thread(target=provider.shutdown, daemon=True)
    sending.start()
    sending.join(LAST_SPANS_S)


class _Complaints(logging.Handler):
    """Tells people what OpenTelemetry complains of, now and then."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told_at = -WARN_EVERY_S

    def emit(self, record: logging.LogRecord) -> None:
        """One of its sentences."""
        now = time.monotonic()
        if now - self._told_at >= WARN_EVERY_S:
            self._told_at = now
            warn(f"traces are lost: {record.getMessage()[:300]}")


def _prefixed(attributes: Attributes) -> Attributes:
    return {PREFIX + name: value for name, value in attributes.items()}


def _context_of(traceparent: str) -> Context:
    return _W3C.extract({"traceparent": traceparent}, _ROOT)


def _named_by(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_context_of(traceparent)).get_span_context()
