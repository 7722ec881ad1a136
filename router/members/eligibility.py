"""Workers that may get requests, and why the others may not.

Whoever learns something about a worker blocks or unblocks it here, for a reason. Nothing else
changes where requests may go, and nothing else has those that wait for a worker tried again.
"""

from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.members.records import MemberRecord, Reason


class FreeList:
    """Workers of one policy with a free place: O(1) add and remove, and a list to choose from."""

    def __init__(self) -> None:
        self.workers: list[MemberRecord] = []

    def __len__(self) -> int:
        return len(self.workers)

    def add(self, worker: MemberRecord) -> None:
        """Put a worker in, if it is not in already."""
        if worker.free_index < 0:
            worker.free_index = len(self.workers)
            self.workers.append(worker)

    def remove(self, worker: MemberRecord) -> None:
        """Take a worker out, if it is in."""
        index = worker.free_index
        if index < 0:
            return
        last = self.workers.pop()
        if last is not worker:
            self.workers[index] = last
            last.free_index = index
        worker.free_index = -1


class Eligibility:
    """Workers that no reason blocks, by policy; of those the ones with a free place."""

    def __init__(self) -> None:
        self.free: dict[str, FreeList] = {}
        self._eligible: dict[str, dict[str, MemberRecord]] = {}
        self._blocked: dict[str, MemberRecord] = {}
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
        """The worker has got its last place's request."""
        free = self.free.get(worker.policy)
        if free is not None:
            free.remove(worker)

    def freed(self, worker: MemberRecord) -> None:
        """A full worker, or a blocked one, carries a request less."""
        self.has_changed = True
        if not worker.blocked_by and len(worker.requests) < worker.capacity:
            self.free[worker.policy].add(worker)

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
        workers = self._eligible.get(policy, {}).values()
        return any(rule is None or rule.accepts(w.version, committed) for w in workers)

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
        if not is_blocked:
            eligible = self._eligible.setdefault(policy, eligible)
            eligible[worker.name] = worker
            free = self.free.setdefault(policy, FreeList())
            if len(worker.requests) < worker.capacity:
                free.add(worker)
            return
        self.filled(worker)
        if eligible.get(worker.name) is worker:
            del eligible[worker.name]
            if not eligible:  # policies are named by workers
                del self._eligible[policy]
                self.free.pop(policy, None)
