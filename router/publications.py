"""Clients' `publish_version` commands: checked, kept until members are there, answered once.

The transaction itself is `router.updates`'s.
Spec: docs/protocol.md, "Weights".
"""

from bus.codec import pack
from bus.entry import Entry
from bus.messages.endings import Problem
from bus.messages.weights import Published, PublishVersion, WorkerUpdate
from router.context import Context, refusal
from router.update import Update
from router.updates import Updates

MEMBERS_GRACE_S = 10.0
"""A publication waits this long for a store and a worker: longer than they need to come back to
a restarted router."""
RETRY_S = 0.5
"""Before a publication is tried again whose workers were all lost on the way."""
MAX_OPEN = 100
"""Publications under way; policies are named by clients."""
ANSWER_KEPT = 10_000
ANSWER_KEPT_S = 60.0
"""An answer is remembered this long, in case its client asks again."""


class _Publication:
    """One `publish_version` that has not been answered."""

    def __init__(self, client: str, rid: str, body: PublishVersion, deadline_at: float) -> None:
        self.client = client
        self.rid = rid
        self.body = body
        self.deadline_at = deadline_at
        self.is_running = False
        self.try_at = 0.0
        self.patience_at = 0.0
        """When it is refused if its members are still missing."""


class Publications:
    """At most one per policy is under way."""

    def __init__(self, context: Context, updates: Updates) -> None:
        self._context = context
        self._updates = updates
        self._open: dict[str, _Publication] = {}
        self._answered: dict[str, tuple[float, Entry]] = {}

    def publish(self, client: str, entry: Entry, body: PublishVersion, now: float) -> None:
        """A trainer's `publish_version`, for the first time or again."""
        context = self._context
        answered = self._answered.get(entry.rid)
        if answered is not None:
            context.to_client(client, answered[1])
            return
        if entry.rid in self._open:
            return
        problem = self._problem_of(body)
        if problem is not None:
            context.refuse(client, entry.rid, problem)
            return
        publication = _Publication(client, entry.rid, body, now + entry.deadline_ms / 1000)
        publication.patience_at = min(publication.deadline_at, now + MEMBERS_GRACE_S)
        self._open[entry.rid] = publication
        self._try(publication, now)

    def tick(self, now: float) -> None:
        """Begin what could not begin before; forget old answers."""
        for publication in list(self._open.values()):
            if not publication.is_running and publication.try_at <= now:
                self._try(publication, now)
        for rid in [rid for rid, (until, _) in self._answered.items() if until <= now]:
            del self._answered[rid]

    def _problem_of(self, body: PublishVersion) -> Problem | None:
        for other in self._open.values():
            if other.body.policy == body.policy:
                message = f"version {other.body.version} is on its way; wait for it"
                return refusal("update_in_progress", message, retry_after_ms=100)
        if len(self._open) >= MAX_OPEN:
            return refusal("busy", f"{MAX_OPEN} publications are under way", retry_after_ms=1000)
        committed = self._context.committed_of(body.policy)
        if body.version < committed:
            message = f"version {body.version} is below the committed {committed}"
            return refusal("stale_version", message, "version")
        return None

    def _try(self, publication: _Publication, now: float) -> None:
        missing = self._missing(publication.body.policy)
        if missing is None:
            publication.is_running = True

            def ended(update: Update, at: float) -> None:
                self._ended(publication, update, at)

            self._updates.start(publication.body, publication.deadline_at, ended, now)
        elif publication.patience_at <= now:
            self._answer(publication, "refused", missing, now)

    def _missing(self, policy: str) -> Problem | None:
        """What an update cannot do without."""
        if self._context.members.store() is None:
            message = "no weight store is connected; start one with `rolloutbus store`"
            return refusal("no_store", message)
        if not self._context.members.workers(policy):
            message = f"no worker serves policy {policy!r}; start one and publish again"
            return refusal("not_ready", message)
        return None

    def _ended(self, publication: _Publication, update: Update, now: float) -> None:
        if update.state == "committed":
            workers = [_worker_update(update, name) for name in update.targets]
            published = Published(update.body.version, workers)
            self._answer(publication, "finished", published, now)
        elif update.met_only_silence and now < publication.deadline_at:
            # Nobody said no: the workers were lost, or this router was frozen for too long.
            publication.is_running = False
            publication.try_at = now + RETRY_S
            publication.patience_at = publication.deadline_at
        else:
            why = "; ".join(f"{name}: {text}" for name, text in sorted(update.problems.items()))
            message = f"version {update.body.version} was not committed: {why or 'no worker'}"
            self._answer(publication, "failed", Problem("update_failed", message, "failed"), now)

    def _answer(
        self, publication: _Publication, kind: str, body: Problem | Published, now: float
    ) -> None:
        answer = Entry(kind, publication.rid, body=pack(body))
        self._answered[publication.rid] = (now + ANSWER_KEPT_S, answer)
        if len(self._answered) > ANSWER_KEPT:
            del self._answered[next(iter(self._answered))]
        del self._open[publication.rid]
        self._context.to_client(publication.client, answer)


def _worker_update(update: Update, name: str) -> WorkerUpdate:
    problem = update.problems.get(name, "")
    return WorkerUpdate(name, not problem, update.stalls_ms.get(name, 0.0), problem)
