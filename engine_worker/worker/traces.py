"""Spans of what one worker carries out: from a command's arrival to its ending.

Only where traces are on, and only for commands that bear a trace.
Spec: docs/watching.md, "Traces".
"""

from collections.abc import Callable, Iterable

from rolloutbus.bus.actor.spans import Attribute, Span, Tracer
from rolloutbus.bus.actor.tracing import trace_of
from rolloutbus.bus.membership.deliveries import Deliveries
from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.commands import COMMANDS, ENDINGS
from rolloutbus.bus.wire.entry import AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, Generated
from rolloutbus.bus.wire.messages.weights import Committed, CommitUpdate, Prepared, PrepareUpdate
from rolloutbus.engine_worker.worker.requests import ITEM_BYTES

SWEEP_S = 1.0


class WorkerTraces:
    """The open spans of one worker."""

    def __init__(self, tracer: Tracer, deliveries: Deliveries, version: Callable[[], int]) -> None:
        """`version`: of the weights that are active now."""
        self._tracer = tracer
        self._deliveries = deliveries
        self._version = version
        self._open: dict[AttemptKey, tuple[str, Span]] = {}
        self._swept_at = 0.0

    def heard(self, entries: Iterable[Entry]) -> None:
        """Entries have come from the router; the core has not seen them yet."""
        for entry in entries:
            trace, key = trace_of(entry), _key_of(entry)
            if not trace or entry.kind not in COMMANDS or key in self._open:
                continue
            about: dict[str, Attribute] = {
                "rid": entry.rid,
                "command": entry.kind,
                "client": entry.route,
                "active_version": self._version(),
                **_asked_in(entry),
            }
            if entry.place is not None and entry.place.session:
                about["session"] = entry.place.session
            span = self._tracer.begin(f"execute {entry.kind}", "server", about, parent=trace)
            self._open[key] = entry.kind, span

    def sent(self, entry: Entry) -> None:
        """Something leaves for the router, perhaps the ending of an execution."""
        if entry.kind not in ENDINGS:
            return
        command, span = self._open.pop(_key_of(entry), ("", None))
        if span is not None:
            span.learn(_told_in(command, entry))
            span.end(entry.kind, is_failure=entry.kind != "finished")

    def tick(self, now: float) -> None:
        """Ends spans of what was taken away, or whose ending waits for a lease."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for key in list(self._open):
            running = self._deliveries.running(key[0])
            if running is not None and running.attempt == key[1]:
                continue
            parcel = self._deliveries.outbox.get(key)
            if parcel is not None:
                self.sent(parcel.entry)
            else:
                _, span = self._open.pop(key)
                span.end("stopped", is_failure=True)


def _key_of(entry: Entry) -> AttemptKey:
    return RequestId(entry.rid), entry.attempt


def _asked_in(entry: Entry) -> dict[str, Attribute]:
    try:
        body = unpack(entry)
    except RemoteProtocolError:
        return {}  # the core refuses it
    match body:
        case Generate():
            about: dict[str, Attribute] = {
                "prompt_tokens": len(body.prompt) // ITEM_BYTES,
                "max_new_tokens": body.sampling.max_new_tokens,
            }
            if body.prefix is not None:
                about["resumed_tokens"] = len(body.prefix.tokens) // ITEM_BYTES
            return about
        case PrepareUpdate() | CommitUpdate():
            return {"policy": body.policy, "version": body.version}
        case _:
            return {}


def _told_in(command: str, entry: Entry) -> "dict[str, Attribute | list[int]]":
    try:
        body = unpack_result(command, entry) if entry.kind == "finished" else unpack(entry)
    except RemoteProtocolError:
        return {}
    match body:
        case Generated():
            return {
                "sampled_tokens": len(body.tokens) // ITEM_BYTES,
                "weight_versions": [version for version, _ in body.versions],
                "finish_reason": body.finish_reason,
                "queue_ms": body.queue_ms,
                "run_ms": body.run_ms,
            }
        case Prepared():
            return {"transport": body.transport, "moved_bytes": body.moved_bytes}
        case Committed():
            return {"stall_ms": body.stall_ms, "attested_version": body.version}
        case Problem():
            return {"error": body.code}
        case _:
            return {}
