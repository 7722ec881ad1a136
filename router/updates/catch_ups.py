"""Workers below the last committed version: served by nobody until the router has brought them up.

A late joiner, a restarted one, one that failed during an update. Adapters are brought likewise.
Spec: docs/protocol.md, "Weights", 3.
"""

from rolloutbus.router.context import Context
from rolloutbus.router.members.member_commands import MemberCommands
from rolloutbus.router.updates.adapters import AdapterReloads
from rolloutbus.router.updates.updates import TAKES_UPDATES, Updates

CATCH_UP_S = 120.0
"""A single worker gets this long to pull and swap."""
RETRY_S = 2.0
"""Before a worker that failed to catch up is tried again."""


class CatchUps:
    """Looks for workers that are behind."""

    def __init__(self, context: Context, updates: Updates, fleet: MemberCommands) -> None:
        self._context = context
        self._updates = updates
        self._adapters = AdapterReloads(context, fleet)

    def tick(self, now: float) -> None:
        """Begin with whoever can begin, unless a version is on its way to all of them."""
        context = self._context
        self._adapters.tick(now)
        if context.in_waves:
            self._resume_waves(now)
        committed = context.committed
        behind = [
            worker
            for worker in context.members.workers()
            if worker.version < committed.get(worker.policy, 0)
            # Before the first publication there is nothing that could mend it.
            or (worker.heartbeat.state == "torn" and worker.policy in committed)
        ]
        if not behind or context.members.store() is None:
            return
        busy = self._updates.busy_policies() | context.in_waves.keys()
        for worker in behind:
            if worker.state != "live" or worker.policy in busy:
                continue
            is_free = not worker.is_catching_up and worker.heartbeat.state in TAKES_UPDATES
            if is_free and worker.retry_update_at <= now:
                worker.retry_update_at = now + RETRY_S
                context.count("catch_ups")
                self._updates.catch_up(worker, committed.get(worker.policy, 0), CATCH_UP_S, now)

    def _resume_waves(self, now: float) -> None:
        """Once everybody could come back: who is not here counts neither as serving nor as behind.

        The publisher may ask for the version again meanwhile; then that goes on.
        """
        context = self._context
        if context.is_recovering or context.members.store() is None:
            return
        busy = self._updates.busy_policies()
        for policy, waves in context.in_waves.items():
            if policy not in busy:
                context.count("resumed_waves")
                self._updates.resume(policy, waves, CATCH_UP_S, now)
