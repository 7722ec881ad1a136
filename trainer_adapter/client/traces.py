"""Spans of a client's requests: from the call to its outcome. Only where traces are on.

Spec: docs/watching.md, "Traces".
"""

from rolloutbus.bus.actor.spans import Attribute, Span, Tracer
from rolloutbus.bus.actor.tracing import POLLED
from rolloutbus.bus.wire.entry import Entry, traced
from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.trainer_adapter.client.core.effects import Outcome
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Rollout


class ClientTraces:
    """The open spans of one client, by rid."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[str, Span] = {}

    def began(self, rid: str, ask: Ask) -> None:
        """A caller asks for this, perhaps within a span of its own."""
        if ask.kind in POLLED:
            return
        known: dict[str, Attribute] = {"rid": rid, "command": ask.kind}
        if ask.route:
            known["route"] = ask.route
        if ask.place is not None:
            known |= {"policy": ask.place.policy, "versions": ask.place.versions}
            known |= {"session": ask.place.session} if ask.place.session else {}
        if isinstance(ask.body, PublishVersion):
            known |= {"policy": ask.body.policy, "version": ask.body.version}
        self._spans[rid] = self._tracer.begin(f"request {ask.kind}", "client", known)

    def sent(self, entry: Entry, *, takes_traces: bool) -> Entry:
        """What is sent for it; with its trace, if the router wants to know."""
        span = self._spans.get(entry.rid) if entry.deadline_ms else None
        if span is None:
            return entry
        span.tell("sent")
        return traced(entry, span.traceparent) if takes_traces else entry

    def ended(self, rid: str, outcome: Outcome) -> None:
        """It is over for its caller."""
        span = self._spans.pop(rid, None)
        if span is None:
            return
        if isinstance(outcome, Rollout):
            span.learn(
                {
                    "sampled_tokens": len(outcome.tokens),
                    "weight_versions": [version for version, _ in outcome.version_runs],
                    "attempts": outcome.n_attempts,
                    "finish_reason": outcome.finish_reason,
                }
            )
        if isinstance(outcome, RequestError):
            span.learn({"error": outcome.code})
        name = type(outcome).__name__ if isinstance(outcome, BusError) else "finished"
        span.end(name, is_failure=isinstance(outcome, BusError))

    def left(self, rid: str) -> None:
        """Its caller does not wait for it any more."""
        span = self._spans.pop(rid, None)
        if span is not None:
            span.end("caller left")
