"""Which worker holds which sessions, and who has room for one more.

Spec: docs/protocol.md, "Sessions".
"""

from collections.abc import Iterable

from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.sessions.record import SessionRecord

LEAVING = frozenset({"draining", "broken"})
"""Heartbeat states of a worker that will not come back as it is."""


class SessionSlots:
    """The sessions at each worker; never more than `sessions_per_slot` lets in, unless moved."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._per_slot = context.settings.sessions_per_slot
        self._at: dict[str, dict[str, SessionRecord]] = {}

    def settle(self, session: SessionRecord, worker: str) -> None:
        """The session has its place at this worker from now on."""
        self.leave(session)
        session.worker = worker
        self._at.setdefault(worker, {})[session.name] = session

    def leave(self, session: SessionRecord) -> None:
        """The session's place is free."""
        there = self._at.get(session.worker)
        if there is not None:
            there.pop(session.name, None)
            if not there:
                del self._at[session.worker]

    def at(self, worker: str) -> list[SessionRecord]:
        """The sessions that this worker holds; a copy."""
        return list(self._at.get(worker, {}).values())

    def counts(self) -> dict[str, int]:
        """Worker -> sessions, for those that hold any."""
        return {worker: len(there) for worker, there in self._at.items()}

    def candidates(self, policy: str) -> list[MemberRecord]:
        """Workers that may hold sessions: those that serve; if none does, all that may again."""
        workers = self._context.members.workers(policy)
        serving = [each for each in workers if not each.blocked_by]
        return serving or [
            each for each in workers if each.state == "live" and each.heartbeat.state not in LEAVING
        ]

    def has_room(self, worker: MemberRecord) -> bool:
        """Whether one more session may be opened there."""
        return self._n_at(worker) < max(1, int(_slots(worker) * self._per_slot))

    def least_filled(self, workers: Iterable[MemberRecord]) -> MemberRecord | None:
        """Who of them holds the fewest sessions for its size."""
        return min(workers, key=self._fill, default=None)

    def _fill(self, worker: MemberRecord) -> tuple[float, int]:
        return self._n_at(worker) / max(1, _slots(worker)), worker.outstanding_cost

    def _n_at(self, worker: MemberRecord) -> int:
        return len(self._at.get(worker.name, ()))


def _slots(worker: MemberRecord) -> int:
    facts = worker.hello.worker
    return facts.slots if facts is not None else 0
