"""Structured logs: a line of JSON on stderr for each request, command and HTTP exchange that ends.

What traces tell a collector, a log tells whoever reads lines. Both may be on.
"""

import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

import msgspec

from rolloutbus.bus.actor.spans import Attributes, Span, SpanKind, Tracer
from rolloutbus.bus.actor.variables import LOG, choice_of

Level = Literal["info", "warning", "error"]
_TRACEPARENT = re.compile("[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}")
"""Source: https://www.w3.org/TR/trace-context/#traceparent-header"""

caller: ContextVar[str] = ContextVar("caller", default="")
"""The traceparent of what the running task works for; empty: nothing that is known."""


class JsonLog:
    """Writes lines of JSON on stderr."""

    def __init__(self, about: Mapping[str, object]) -> None:
        """`about`: what each line says of who writes it."""
        self._about = about

    def write(self, level: Level, event: str, fields: Mapping[str, object]) -> None:
        """One line; a disk that is full costs the line, and nothing else."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            **self._about,
            "event": event,
            **fields,
        }
        with suppress(OSError):
            sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
            sys.stderr.flush()


def json_log_of(about: Mapping[str, object]) -> JsonLog | None:
    """What lines of JSON are written with; None: the log is text for people.

    Args:
        about: what each line says of who writes it.

    Raises:
        SettingsError: the environment asks for something that there is not.
    """
    return JsonLog(about) if choice_of(LOG) == "json" else None


class LogTracer:
    """Writes each span when it ends; hands it on to another tracer, if there is one."""

    def __init__(
        self,
        log: JsonLog,
        exported: Tracer | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`now`: monotonic, seconds."""
        self.log = log
        self.now = now
        self._exported = exported

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> "LogSpan":
        """A span that begins now; see the port."""
        exported = None
        if self._exported is not None:
            exported = self._exported.begin(name, kind, attributes, parent=parent, links=links)
        above = caller.get() if parent is None else parent
        traceparent = child_of(above) if exported is None else exported.traceparent
        return LogSpan(self, name, attributes, exported, (traceparent, above))


class LogSpan:
    """One line to be."""

    def __init__(
        self,
        tracer: LogTracer,
        name: str,
        attributes: Attributes,
        exported: Span | None,
        place: tuple[str, str],
    ) -> None:
        """`place`: its own traceparent, and that of what it stands below."""
        self.traceparent = place[0]
        self._tracer = tracer
        self._name = name
        self._known: dict[str, object] = dict(attributes)
        self._exported = exported
        self._place = place_of(*place)
        self._began_at = tracer.now()
        self._events: list[str] = []
        self._is_over = False

    def tell(self, event: str, attributes: Attributes | None = None) -> None:
        """Something happened now; the line lists it."""
        self._events.append(event)
        self._known |= attributes or {}
        if self._exported is not None:
            self._exported.tell(event, attributes or {})

    def learn(self, attributes: Attributes) -> None:
        """More is known about it."""
        self._known |= attributes
        if self._exported is not None:
            self._exported.learn(attributes)

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """It is over now, and written; only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        if self._exported is not None:
            self._exported.end(outcome, is_failure=is_failure)
        fields = {
            "outcome": outcome,
            "duration_ms": round(1e3 * (self._tracer.now() - self._began_at), 3),
            **self._known,
            **({"happened": self._events} if self._events else {}),
            **self._place,
        }
        self._tracer.log.write("error" if is_failure else "info", self._name, fields)


def child_of(traceparent: str) -> str:
    """A traceparent of something new: in the trace of `traceparent`, or in one of its own."""
    known = _TRACEPARENT.fullmatch(traceparent)
    trace = secrets.token_hex(16) if known is None else known["trace"]
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def place_of(traceparent: str, above: str = "") -> dict[str, str]:
    """Fields that tell to which trace a line belongs, and below which of its lines it stands."""
    own, parent = _TRACEPARENT.fullmatch(traceparent), _TRACEPARENT.fullmatch(above)
    return (own.groupdict() if own else {}) | ({"parent": parent["span"]} if parent else {})
