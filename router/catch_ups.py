"""Workers below the last committed version: served by nobody until the router has brought them up.

A late joiner, a restarted one, one that failed during an update.
Spec: docs/protocol.md, "Weights", 3.
"""

from router.context import Context
from router.updates import TAKES_UPDATES, Updates

CATCH_UP_S = 120.0
"""A single worker gets this long to pull and swap."""
RETRY_S = 2.0
"""Before a worker that failed to catch up is tried again."""


class CatchUps:
    """Looks for workers that are behind."""

    def __init__(self, context: Context, updates: Updates) -> None:
        self._context = context
        self._updates = updates

    def tick(self, now: float) -> None:
        """Begin with whoever can begin, unless a version is on its way to all of them."""
        context = self._context
        if context.members.store() is None:
            return
        busy = self._updates.busy_policies()
        for worker in context.members.workers():
            committed = context.committed_of(worker.policy)
            is_whole = worker.version >= committed and worker.beat.state != "torn"
            if is_whole or worker.state != "live" or worker.policy in busy:
                continue
            is_free = not worker.is_catching_up and worker.beat.state in TAKES_UPDATES
            if is_free and worker.retry_update_at <= now:
                worker.retry_update_at = now + RETRY_S
                context.count("catch_ups")
                self._updates.catch_up(worker, committed, CATCH_UP_S, now)
