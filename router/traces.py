"""Tells where traces are collected what becomes of each request, out of events and effects.

Only where traces are on: the core neither knows of them nor sees them, and journals and taps show
entries without. A request that waits or runs here has a span, and in it one for each execution that
a member is sent.
Spec: docs/watching.md, "Traces".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rolloutbus.bus.actor.effects import SendAll
from rolloutbus.bus.actor.spans import Attribute, Span, Tracer
from rolloutbus.bus.actor.tracing import POLLED, trace_of
from rolloutbus.bus.wire.codec import TRACED_VERSION, unpack, unpack_result
from rolloutbus.bus.wire.commands import COMMANDS, ENDINGS
from rolloutbus.bus.wire.entry import AttemptKey, Entry, Peer, RequestId, traced, untraced
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Accepted, Lost, Problem, Queued
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    Prepared,
    PrepareUpdate,
    PublishVersion,
    RecordCommit,
)
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Event, Handle, Received, Returned, Ticked

SWEEP_S = 1.0
FORGOTTEN_S = 10.0
"""A request that the core does not know for so long has no ending any more: its client is gone, or
does not go on after a loss."""
OVERTIME_S = 60.0
"""A command that was not answered for so long after its deadline never will be."""
MAX_OPEN = 100_000
"""Requests with a span; more are not told of."""
MAX_PUBLISHED = 64
"""Updates that later work for the same version is linked to."""
PHASES = {
    "prepare_update": "transfer",
    "record_commit": "commit",
    "commit_update": "swap",
    "abort_update": "abort",
}
"""Command of an update -> what happens then."""
Version = tuple[str, int]
"""(policy, number)."""
About = dict[str, Attribute]


class _Execution(NamedTuple):
    """What a member was sent, and has not ended."""

    kind: str
    span: Span
    of: str
    """rid of the client's command that it is for; empty: the router's own."""


@dataclass(slots=True)
class _Request:
    """One command of a client, from its arrival to its ending."""

    span: Span
    is_generate: bool
    gives_up_at: float
    unknown_since: float | None = None
    """When the core was first seen without it."""
    wait: Span | None = None
    """Until a worker gets it."""
    n_tries: int = 0
    keys: set[AttemptKey] = field(default_factory=set[AttemptKey])
    """Its executions that have not ended."""


class RouterTraces:
    """The open spans of one router."""

    def __init__(self, tracer: Tracer, core: RouterCore) -> None:
        self._tracer = tracer
        self._core = core
        self._requests: dict[str, _Request] = {}
        self._executions: dict[AttemptKey, _Execution] = {}
        """Also those of the router's own commands, which belong to no request."""
        self._publishing: dict[Version, str] = {}
        """Version -> rid of the command that publishes it."""
        self._published: dict[Version, str] = {}
        """Version -> traceparent of the command that published it."""
        self._swept_at = 0.0

    def heard(self, peer: Peer, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Takes what came; returns what the core is told."""
        is_client = self._core.context.clients.at(peer) is not None
        for entry in entries:
            if is_client:
                if entry.kind in COMMANDS and entry.kind not in POLLED:
                    self._asked(entry, now)
            elif entry.kind in ENDINGS:
                self._executed(entry)
            elif entry.kind == "accepted":
                self._accepted(entry)
        return [untraced(entry) for entry in entries]

    def told(self, effects: Sequence[Effect]) -> None:
        """Takes what the core wants sent; commands to members get their trace."""
        for effect in effects:
            if isinstance(effect, SendAll):
                self._sent(effect)

    def tick(self, now: float) -> None:
        """Ends spans of what never will end."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for rid, request in list(self._requests.items()):
            if not request.is_generate or self._core.table.get(rid) is not None:
                request.unknown_since = None
            elif request.unknown_since is None:
                request.unknown_since = now
            since = now if request.unknown_since is None else request.unknown_since
            if now > request.gives_up_at or now - since > FORGOTTEN_S:
                self._answered(rid, "forgotten", {})
        present = {member.name for member in self._core.context.members}
        for key in list(self._executions):
            member = key[0].rpartition("@")[2]
            if member != key[0] and member not in present:
                self._over(key, "lost")

    def _asked(self, entry: Entry, now: float) -> None:
        known = self._requests.get(entry.rid)
        if known is not None:
            known.span.tell("asked again")
            self._wait(known, entry.rid)
            return
        if len(self._requests) >= MAX_OPEN:
            return
        about: About = {"rid": entry.rid, "command": entry.kind}
        if entry.place is not None:
            about |= {"policy": entry.place.policy, "versions": entry.place.versions}
            about |= {"session": entry.place.session} if entry.place.session else {}
        body = _body_of(entry) if entry.kind == "publish_version" else None
        if isinstance(body, PublishVersion):
            about |= {"policy": body.policy, "version": body.version, "require": body.require}
        span = self._tracer.begin(f"route {entry.kind}", "server", about, parent=trace_of(entry))
        gives_up_at = now + entry.deadline_ms / 1000 + OVERTIME_S
        request = _Request(span, entry.kind == "generate", gives_up_at)
        self._requests[entry.rid] = request
        self._wait(request, entry.rid)
        if isinstance(body, PublishVersion):
            span.tell("announced")
            self._publishing[body.policy, body.version] = entry.rid
            self._published[body.policy, body.version] = span.traceparent
            if len(self._published) > MAX_PUBLISHED:
                del self._published[next(iter(self._published))]

    def _wait(self, request: _Request, rid: str) -> None:
        if request.is_generate and request.wait is None and not request.keys:
            parent = request.span.traceparent
            request.wait = self._tracer.begin("wait", "internal", {"rid": rid}, parent=parent)

    def _sent(self, effect: SendAll) -> None:
        entries = effect.entries
        for at, entry in enumerate(entries):
            if entry.kind in COMMANDS:
                entries[at] = self._given(effect.peer, entry)
            elif entry.kind in ENDINGS:
                self._answered(entry.rid, entry.kind, _error_in(entry))
            elif entry.kind in ("lost", "queued"):
                match _body_of(entry):
                    case Lost(items):
                        for rid, attempt in items:
                            self._over((RequestId(rid), attempt), "lost")
                    case Queued(rids):
                        for rid in rids:
                            if rid in self._requests:
                                self._requests[rid].span.tell("queued")
                    case _:
                        pass

    def _given(self, peer: Peer, entry: Entry) -> Entry:
        """A command for a member, with the trace that its work belongs to."""
        member = self._core.context.members.at(peer)
        if member is None or not entry.rid or entry.kind in POLLED:
            return entry
        key = RequestId(entry.rid), entry.attempt
        known = self._executions.get(key)
        if known is not None:
            span = known.span
            span.tell("sent again")
        else:
            span = self._begun(entry, key, member.name)
        takes_traces = member.hello.protocol[1] >= TRACED_VERSION
        return traced(entry, span.traceparent) if takes_traces else entry

    def _begun(self, entry: Entry, key: AttemptKey, member: str) -> Span:
        about: About = {"rid": entry.rid, "member": member, "command": entry.kind}
        of, links = entry.rid.partition("@")[0], list[str]()
        body = _body_of(entry) if entry.kind in PHASES else None
        if isinstance(body, PrepareUpdate | CommitUpdate | AbortUpdate | RecordCommit):
            version = body.policy, body.version
            of = self._publishing.get(version, "")
            links = [self._published[version]] if version in self._published else []
            about |= {"policy": body.policy, "version": body.version, "phase": PHASES[entry.kind]}
        request = self._requests.get(of)
        if request is not None and request.is_generate:
            self._next_try(request)
            about |= {"try": request.n_tries, "attempt": f"{entry.attempt[0]}.{entry.attempt[1]}"}
            about |= {"versions": entry.place.versions} if entry.place is not None else {}
        if request is None:
            of = ""
            span = self._tracer.begin(entry.kind, "client", about, parent="", links=links)
        else:
            request.keys.add(key)
            name = "attempt" if request.is_generate else entry.kind
            span = self._tracer.begin(name, "client", about, parent=request.span.traceparent)
        self._executions[key] = _Execution(entry.kind, span, of)
        return span

    def _next_try(self, request: _Request) -> None:
        for earlier in list(request.keys):
            self._over(earlier, "given to another worker")
        if request.wait is not None:
            request.wait.end("sent")
            request.wait = None
        request.n_tries += 1

    def _accepted(self, entry: Entry) -> None:
        body = _body_of(entry)
        if isinstance(body, Accepted):
            for rid, attempt in body.items:
                known = self._executions.get((RequestId(rid), attempt))
                if known is not None:
                    known.span.tell("accepted")

    def _executed(self, entry: Entry) -> None:
        """A member has ended what it was sent."""
        key = RequestId(entry.rid), entry.attempt
        known = self._executions.get(key)
        if known is None:
            return
        known.span.learn(_error_in(entry))
        if entry.kind == "finished" and known.kind in PHASES:
            _learn_result(known, entry)
        self._over(key, entry.kind)

    def _over(self, key: AttemptKey, outcome: str) -> None:
        known = self._executions.pop(key, None)
        if known is None:
            return
        known.span.end(outcome, is_failure=outcome != "finished")
        if known.of in self._requests:
            self._requests[known.of].keys.discard(key)

    def _answered(self, rid: str, outcome: str, about: About) -> None:
        """A client is told how its command ended."""
        request = self._requests.pop(rid, None)
        if request is None:
            return
        for key in list(request.keys):
            self._over(key, outcome)
        if request.wait is not None:
            request.wait.end(outcome)
        request.span.learn(about)
        request.span.end(outcome, is_failure=outcome != "finished")
        self._publishing = {v: by for v, by in self._publishing.items() if by != rid}


def _learn_result(of: _Execution, entry: Entry) -> None:
    """What a worker tells of its part in an update."""
    try:
        result = unpack_result(of.kind, entry)
    except RemoteProtocolError:
        return  # the core counts it
    match result:
        case Prepared():
            of.span.learn(
                {
                    "transport": result.transport,
                    "pull_ms": result.pull_ms,
                    "moved_bytes": result.moved_bytes,
                }
            )
        case Committed():
            of.span.learn({"stall_ms": result.stall_ms})
            of.span.tell("attested", {"version": result.version})
        case _:
            pass


def _error_in(entry: Entry) -> About:
    """The code of an ending that is no result."""
    body = None if entry.kind in ("finished", "cancelled") else _body_of(entry)
    return {"error": body.code} if isinstance(body, Problem) else {}


def _body_of(entry: Entry) -> msgspec.Struct | None:
    """The body, if it is well formed: what the core makes of any other is its matter."""
    try:
        return unpack(entry)
    except RemoteProtocolError:
        return None


def traced_handle(handle: Handle, traces: RouterTraces) -> Handle:
    """The same decisions, each of which is told where traces are collected."""

    def handle_and_trace(event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, entries, principal, host):
                event = Received(peer, traces.heard(peer, entries, now), principal, host)
            case Returned(peer, entries):
                event = Returned(peer, [untraced(entry) for entry in entries])
            case Ticked():
                traces.tick(now)
            case _:
                pass
        effects = handle(event, now)
        traces.told(effects)
        return effects

    return handle_and_trace
