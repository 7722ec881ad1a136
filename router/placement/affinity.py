"""The stage that keeps sessions and groups together, each at the worker of its last request.

Sessions that were opened go to `router.placement.sessions` first.
"""

from collections import OrderedDict

from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request

AFFINITY_LIMIT = 100_000
"""Sessions and groups remembered; the least recently used are forgotten first."""
STICKY_OVERCOMMIT = 2
"""A sticky request may queue at its worker up to this many times the worker's capacity:
waiting a little for a warm prefix cache is cheaper than a prefill elsewhere."""


class StickyKeys:
    """key -> worker name, bounded, least recently used first out."""

    def __init__(self) -> None:
        self._worker_of: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_of)

    def get(self, key: str) -> str | None:
        """Where the key sticks."""
        worker = self._worker_of.get(key)
        if worker is not None:
            self._worker_of.move_to_end(key)
        return worker

    def put(self, key: str, worker: str) -> None:
        """From now on the key sticks to this worker."""
        self._worker_of[key] = worker
        self._worker_of.move_to_end(key)
        if len(self._worker_of) > AFFINITY_LIMIT:
            self._worker_of.popitem(last=False)

    def forget(self, key: str) -> bool:
        """Drop the key; False if it was unknown."""
        return self._worker_of.pop(key, None) is not None


class Affinity:
    """Where sessions and groups live."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.sessions = StickyKeys()
        self.groups = StickyKeys()

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """The worker of the session or the group if it has room, else another one from now on."""
        place = request.place
        if not (place.session or place.group):
            return rest(request, now)
        worker = self._held(request)
        if worker is not None:
            return worker
        worker = rest(request, now)
        if worker is not None and place.session:
            self.stick(place.session, worker.name)
        if worker is not None and place.group:
            self.groups.put(place.group, worker.name)
        return worker

    def stick(self, session: str, worker: str) -> None:
        """From now on the session's requests like this worker."""
        before = self.sessions.get(session)
        self._context.count("sessions_moved", int(before not in (None, worker)))
        self.sessions.put(session, worker)

    def _held(self, request: Request) -> MemberRecord | None:
        place = request.place
        name = self.sessions.get(place.session) if place.session else None
        name = name or (self.groups.get(place.group) if place.group else None)
        worker = self._context.eligibility.named(place.policy, name) if name else None
        if worker is None or not self._context.may_serve(worker, request.rule):
            return None
        return worker if may_queue_at(worker) else None


def may_queue_at(worker: MemberRecord) -> bool:
    """Whether one more request that sticks may go there, to wait if need be."""
    return len(worker.requests) < worker.capacity * STICKY_OVERCOMMIT
