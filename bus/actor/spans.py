"""Spans: what the shells of actors tell of requests and updates, whoever collects it."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

Role = Literal["client", "gateway", "router", "worker"]
SpanKind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool
Attributes = Mapping[str, Attribute | Sequence[str] | Sequence[int]]
"""Names without the prefix that all of them get."""


class Span(Protocol):
    """One thing that takes time, of one trace."""

    @property
    def traceparent(self) -> str:
        """What those who work for it are told, as W3C writes it."""
        ...

    def tell(self, event: str, attributes: Attributes = ...) -> None:
        """Something happened now."""
        ...

    def learn(self, attributes: Attributes) -> None:
        """More is known about it."""
        ...

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """It is over now; only the first call counts."""
        ...


class Tracer(Protocol):
    """Begins spans, and sends them off when they have ended."""

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """A span that begins now.

        Args:
            name: one of few.
            kind: which side of a conversation it is.
            attributes: what is known of it now.
            parent: a traceparent; empty: it begins a trace; None: the span that the caller is in.
            links: traceparents of what it has to do with.
        """
        ...
