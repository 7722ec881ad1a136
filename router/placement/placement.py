"""Which worker gets a request: affinity first, then the less loaded of two random ones.

Pipeline: policy -> weight version -> session -> group -> power of two choices, over the workers
that have a free place -> what others have cached of the prompt. Workers with a free place are kept
in one list per policy, so a choice costs the same with 8 workers and with 1,000.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord

AFFINITY_LIMIT = 100_000
"""Sessions and groups remembered; the least recently used are forgotten first."""
STICKY_OVERCOMMIT = 2
"""A sticky request may queue at its worker up to this many times the worker's capacity:
waiting a little for a warm prefix cache is cheaper than a prefill elsewhere."""


class Affinity:
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


class CacheAware(Protocol):
    """Knows who has which beginnings of prompts cached."""

    def better(
        self, marks: bytes, default: MemberRecord, may_take: Callable[[MemberRecord], bool]
    ) -> MemberRecord:
        """The worker for a prompt with these marks, instead of `default` perhaps."""
        ...


class Placer:
    """Chooses workers and remembers where sessions and groups live."""

    def __init__(self, context: Context, chance: Chance, caches: CacheAware) -> None:
        self._eligibility = context.eligibility
        self._chance = chance
        self._caches = caches
        self.sessions = Affinity()
        self.groups = Affinity()
        self.n_moved = 0
        """Sessions that had to change their worker."""

    def may_queue_at(self, worker: MemberRecord) -> bool:
        """Whether one more request that sticks may go there, to wait if need be."""
        return len(worker.requests) < worker.capacity * STICKY_OVERCOMMIT

    def stick(self, session: str, worker: str) -> None:
        """From now on the session's requests like this worker."""
        before = self.sessions.get(session)
        self.n_moved += before is not None and before != worker
        self.sessions.put(session, worker)

    def chooser(
        self, place: Placement, rule: VersionRule | None, committed: int
    ) -> Callable[[], MemberRecord | None]:
        """`choose` for a run of such requests; good until a worker joins, changes or is lost."""
        free = self._eligibility.free.get(place.policy)
        if free is None or rule is not None or place.session or place.group or place.marks:
            return partial(self.choose, place, rule, committed)
        return partial(free.choose, self._chance, None, 0)

    def choose(
        self, place: Placement, rule: VersionRule | None, committed: int
    ) -> MemberRecord | None:
        """A worker with a place for this request, or None."""
        has_affinity = bool(place.session or place.group)
        if has_affinity:
            worker = self._sticky(place, rule, committed)
            if worker is not None:
                return worker
        free = self._eligibility.free.get(place.policy)
        if free is None:
            return None
        worker = free.choose(self._chance, rule, committed)
        if place.marks and worker is not None:
            worker = self.warmest(place, rule, committed, worker)
        if has_affinity and worker is not None:
            self._remember(place, worker.name)
        return worker

    def _sticky(
        self, place: Placement, rule: VersionRule | None, committed: int
    ) -> MemberRecord | None:
        name = self.sessions.get(place.session) if place.session else None
        name = name or (self.groups.get(place.group) if place.group else None)
        worker = self._eligibility.named(place.policy, name) if name else None
        if worker is None or (rule is not None and not rule.accepts(worker.version, committed)):
            return None
        return worker if self.may_queue_at(worker) else None

    def warmest(
        self, place: Placement, rule: VersionRule | None, committed: int, default: MemberRecord
    ) -> MemberRecord:
        """The worker with a free place whose cache outweighs its load, or else `default`."""

        def may_take(worker: MemberRecord) -> bool:
            return (
                worker.free_index >= 0
                and worker.policy == place.policy
                and (rule is None or rule.accepts(worker.version, committed))
            )

        return self._caches.better(place.marks, default, may_take)

    def _remember(self, place: Placement, worker: str) -> None:
        if place.session:
            self.stick(place.session, worker)
        if place.group:
            self.groups.put(place.group, worker)


def made_concrete(place: Placement, rule: VersionRule, committed: int) -> Placement:
    """What the worker checks: a rule that needs no ledger."""
    return Placement(
        place.policy,
        rule.concrete(committed),
        place.session,
        place.group,
        place.cost,
        place.priority,
        outlives_client=place.outlives_client,
    )
