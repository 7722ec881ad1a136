"""The stage for requests that name their worker: no other one gets them.

Spec: docs/protocol.md, "Generation".
"""

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request

FIELD = "place.worker"


class Pinned:
    """Waits for the one worker, as others wait for a version that no worker has yet."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """The worker that is named, if it takes requests and has a free place."""
        place = request.place
        if not place.worker:
            return rest(request, now)
        worker = self._context.eligibility.named(place.policy, place.worker)
        if worker is None or len(worker.requests) >= worker.capacity:
            return None
        return worker if self._context.may_serve(worker, request.rule) else None


def absence_of(context: Context, place: Placement) -> Problem | None:
    """The reason why the named worker cannot serve it: unknown here, or of another policy."""
    worker = context.members.named(place.worker)
    if worker is not None and worker.role == "worker":
        if worker.policy == place.policy:
            return None
        message = f"worker {place.worker!r} serves policy {worker.policy!r}, not {place.policy!r}"
        return refusal("unknown_worker", message, FIELD)
    if context.is_recovering or place.worker in context.expected.missing(place.policy):
        return None
    names = sorted(each.name for each in context.members.workers(place.policy))
    there = f"there are {', '.join(names[:8])}" if names else "there is none"
    message = f"no worker {place.worker!r} of policy {place.policy!r} is here or expected; {there}"
    return refusal("unknown_worker", message, FIELD)


def lateness_of(context: Context, request: Request) -> Problem:
    """Why the deadline passed while the request waited for the worker that it names."""
    place = request.place
    worker = context.members.named(place.worker)
    why = context.expected.missing(place.policy).get(place.worker, "it is not here")
    if worker is not None:
        if not context.may_serve(worker, request.rule):
            message = f"worker {place.worker!r} has version {worker.version}, not {place.versions}"
            return refusal("version_unavailable", message, "place.versions")
        why = f"it is {worker.shown_state}" if worker.blocked_by else "it had no free place"
    message = f"worker {place.worker!r} did not take it before the deadline: {why}"
    return refusal("deadline", message, FIELD)
