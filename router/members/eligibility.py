"""Workers that may get requests, and why the others may not.

Whoever learns something about a worker blocks or unblocks it here, for a reason. Nothing else
changes where requests may go, and nothing else has those that wait for a worker tried again.
"""

from collections.abc import Callable

from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.members.records import MemberRecord, Reason


def _nobody_cares(_worker: MemberRecord) -> None:
    """Default of `Eligibility.on_change`."""


class FreeList:
    """Workers of one policy: O(1) add and remove, and lists to choose from.

    A worker is in one such list, or in none.
    """

    def __init__(self) -> None:
        self.by_version: dict[int, list[MemberRecord]] = {}
        """By the version of their weights, of which there are few at a time; no list is empty."""
        self.lists: list[list[MemberRecord]] = []
        """Those of `by_version`; kept, because each request asks."""

    def __len__(self) -> int:
        return sum(map(len, self.by_version.values()))

    def add(self, worker: MemberRecord) -> None:
        """Put a worker in that is in none."""
        version = worker.version
        workers = self.by_version.get(version)
        if workers is None:
            workers = self.by_version[version] = []
            self.lists = [*self.by_version.values()]
        worker.free_index, worker.free_version = len(workers), version
        workers.append(worker)

    def remove(self, worker: MemberRecord) -> None:
        """Take a worker out that is in."""
        index = worker.free_index
        workers = self.by_version[worker.free_version]
        last = workers.pop()
        if last is not worker:
            workers[index] = last
            last.free_index = index
        elif not workers:
            del self.by_version[worker.free_version]
            self.lists = [*self.by_version.values()]
        worker.free_index = -1


class FreePlaces:
    """Workers of one policy with a free place.

    One in a queue is worth less than any slot: who gets it waits for the end of another request,
    perhaps while a slot of another worker stays empty.
    """

    def __init__(self) -> None:
        self.slots = FreeList()
        """Those with a free slot."""
        self.queues = FreeList()
        """Those that have a place in their queue alone."""

    def file(self, worker: MemberRecord) -> None:
        """Put a worker where it belongs by its version and load, wherever it was."""
        has_slot = len(worker.requests) < worker.slots
        if worker.free_index >= 0:
            if worker.free_version == worker.version and worker.has_free_slot == has_slot:
                return
            self.remove(worker)
        worker.has_free_slot = has_slot
        (self.slots if has_slot else self.queues).add(worker)

    def remove(self, worker: MemberRecord) -> None:
        """Take a worker out, if it is in any."""
        if worker.free_index >= 0:
            (self.slots if worker.has_free_slot else self.queues).remove(worker)


class Eligibility:
    """Workers that no reason blocks, by policy; of those the ones with a free place."""

    def __init__(self) -> None:
        self.free: dict[str, FreePlaces] = {}
        self._eligible: dict[str, dict[str, MemberRecord]] = {}
        self._versions: dict[str, dict[int, int]] = {}
        """Policy -> version -> how many eligible workers have it; no zeros."""
        self._blocked: dict[str, MemberRecord] = {}
        self.on_change: Callable[[MemberRecord], None] = _nobody_cares
        """Called with a worker that may have begun or ceased to take requests."""
        self.has_changed = False
        """A request that found no worker before may find one now. Set here and nowhere else;
        cleared by the dispatcher when it has tried all that wait."""

    def block(self, worker: MemberRecord, reason: Reason) -> None:
        """Give the worker no new requests for this reason, until it is taken back."""
        worker.blocked_by.add(reason)
        self._update(worker)

    def unblock(self, worker: MemberRecord, reason: Reason) -> None:
        """This reason holds no more; others may."""
        worker.blocked_by.discard(reason)
        self._update(worker)

    def note(self, worker: MemberRecord, reason: Reason, *, is_blocking: bool) -> None:
        """Block or unblock the worker: what the reason stands for was looked at again."""
        if is_blocking:
            self.block(worker, reason)
        else:
            self.unblock(worker, reason)

    def filled(self, worker: MemberRecord) -> None:
        """The worker has got its last slot's request, or one more."""
        free = self.free.get(worker.policy)
        if free is None or worker.free_index < 0:
            return
        if len(worker.requests) < worker.capacity:
            free.file(worker)
        else:
            free.remove(worker)

    def freed(self, worker: MemberRecord) -> None:
        """A worker without a free slot, or a blocked one, carries a request less."""
        n_requests = len(worker.requests)
        if worker.blocked_by or n_requests + 1 >= worker.capacity:
            self.has_changed = True
        if not worker.blocked_by and n_requests < worker.capacity:
            self.free[worker.policy].file(worker)

    def workers(self, policy: str) -> list[MemberRecord]:
        """Workers of a policy that take requests, free or full."""
        return list(self._eligible.get(policy, {}).values())

    def blocked(self) -> list[MemberRecord]:
        """Connected workers of all policies that get no requests now."""
        return list(self._blocked.values())

    def named(self, policy: str, name: str) -> MemberRecord | None:
        """The worker of this policy and name, if it takes requests."""
        return self._eligible.get(policy, {}).get(name)

    def can_serve(self, policy: str, rule: VersionRule | None, committed: int) -> bool:
        """Whether any worker, free or full, could serve such a request now."""
        versions = self._versions.get(policy, ())
        return any(rule is None or rule.accepts(version, committed) for version in versions)

    def _update(self, worker: MemberRecord) -> None:
        """Bring both tables in step with the worker's reasons and load."""
        self.has_changed = True
        policy = worker.policy
        eligible = self._eligible.get(policy, {})
        is_blocked = bool(worker.blocked_by)
        if is_blocked and Reason.GONE not in worker.blocked_by:
            self._blocked[worker.name] = worker
        elif self._blocked.get(worker.name) is worker:
            del self._blocked[worker.name]
        self._count(worker, None if is_blocked else worker.version)
        if not is_blocked:
            eligible = self._eligible.setdefault(policy, eligible)
            eligible[worker.name] = worker
            free = self.free.setdefault(policy, FreePlaces())
            if len(worker.requests) < worker.capacity:
                free.file(worker)
            self.on_change(worker)
            return
        self.on_change(worker)
        if policy in self.free:
            self.free[policy].remove(worker)
        if eligible.get(worker.name) is worker:
            del eligible[worker.name]
            if not eligible:  # policies are named by workers
                del self._eligible[policy]
                self.free.pop(policy, None)

    def _count(self, worker: MemberRecord, version: int | None) -> None:
        """Count the worker among those of this version, instead of where it was counted before."""
        before = worker.counted_version
        if before == version:
            return
        versions = self._versions.setdefault(worker.policy, {})
        if before is not None:
            versions[before] -= 1
            if not versions[before]:
                del versions[before]
        if version is not None:
            versions[version] = versions.get(version, 0) + 1
        worker.counted_version = version
        if not versions:  # policies are named by workers
            del self._versions[worker.policy]
