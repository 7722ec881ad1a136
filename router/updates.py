"""Weight updates as transactions: prepare everywhere, record the decision, commit.

A worker below the last committed version serves nobody: the router brings it up to date by
itself (a late joiner, a restarted one, one that failed during an update).
Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bus.codec import pack, unpack, unpack_result
from bus.entry import Entry
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.messages.control import WorkerOutcome
from bus.messages.endings import Problem
from bus.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    PrepareUpdate,
    Published,
    PublishVersion,
    RecordCommit,
    WorkerUpdate,
)
from router.context import Context, refusal
from router.fleet import Fleet, MemberCommand, Results, problem_of
from router.members import MemberRecord

UpdateState = Literal["preparing", "recording", "committing", "committed", "aborted"]

UPDATE_LIFE: dict[UpdateState, dict[str, UpdateState]] = {
    # workers pull and verify the bytes beside the weights they serve with
    "preparing": {"prepared": "recording", "rule_broken": "aborted"},
    # the store writes the decision; from here on the version counts
    "recording": {"recorded": "committing", "not_recorded": "aborted"},
    # workers swap, each between two of its steps
    "committing": {"done": "committed"},
    "committed": {},
    "aborted": {},
}
"""state -> event -> state of a fleet update."""

CATCH_UP_S = 120.0
"""A single worker gets this long to pull and swap."""
MEMBERS_GRACE_S = 10.0
"""An update waits this long for a store and a worker: longer than they need to come back to a
restarted router."""
CATCH_UP_RETRY_S = 2.0
"""Before a worker that failed to catch up is tried again."""


@dataclass(slots=True)
class Update:
    """One version on its way to workers."""

    name: str
    body: PublishVersion
    deadline_at: float
    client: str = ""
    """Who is answered; empty for a catch-up."""
    rid: str = ""
    state: UpdateState = "preparing"
    targets: list[str] = field(default_factory=list[str])
    problems: dict[str, str] = field(default_factory=dict[str, str])
    stalls_ms: dict[str, float] = field(default_factory=dict[str, float])

    def advance(self, event: str) -> None:
        """Move along UPDATE_LIFE.

        Raises:
            LocalProtocolError: the event has no meaning in this state; nothing changed.
        """
        following = UPDATE_LIFE[self.state].get(event)
        if following is None:
            msg = f"update {self.name}: {event!r} cannot happen while {self.state!r}"
            raise LocalProtocolError(msg)
        self.state = following


class _Waiting(NamedTuple):
    """A `publish_version` that came while no store was connected."""

    client: str
    entry: Entry
    body: PublishVersion
    until: float


class Updates:
    """The version ledger's writer: at most one update per policy at a time."""

    def __init__(
        self, context: Context, fleet: Fleet, on_change: Callable[[MemberRecord, float], None]
    ) -> None:
        self._context = context
        self._fleet = fleet
        self._on_change = on_change
        self._current: dict[str, Update] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._unrecorded: list[tuple[Update, list[str]]] = []
        """Prepared updates whose decision the store could not take yet."""
        self._n = 0

    def publish(self, client: str, entry: Entry, body: PublishVersion, now: float) -> None:
        """A trainer's `publish_version`."""
        context = self._context
        running = self._current.get(body.policy)
        if running is not None:
            if running.rid != entry.rid:
                message = f"version {running.body.version} is on its way; wait for it"
                problem = refusal("update_in_progress", message, retry_after_ms=100)
                context.refuse(client, entry.rid, problem)
            return
        committed = context.committed_of(body.policy)
        if body.version < committed:
            message = f"version {body.version} is below the committed {committed}"
            context.refuse(client, entry.rid, refusal("stale_version", message, "version"))
            return
        missing = self._missing(body.policy)
        if missing is not None:
            grace_s = min(MEMBERS_GRACE_S, entry.deadline_ms / 1000)
            wait = _Waiting(client, entry, body, now + grace_s)
            self._waiting.setdefault(entry.rid, wait)
            return
        update = self._new(body, now + entry.deadline_ms / 1000)
        update.client, update.rid = client, entry.rid
        self._current[body.policy] = update
        self._prepare(update, context.members.workers(body.policy), now)

    def tick(self, now: float) -> None:
        """Bring workers that fell behind up to date, one transaction each."""
        context = self._context
        self._retry_waiting(now)
        if context.members.store() is None:
            return
        for worker in context.members.workers():
            committed = context.committed_of(worker.policy)
            is_behind = worker.state == "live" and worker.version < committed
            can_update = worker.beat.state in {"ready", "paused", "updating"}
            is_idle = not worker.is_catching_up and worker.policy not in self._current
            if is_behind and can_update and is_idle and worker.retry_update_at <= now:
                self._catch_up(worker, committed, now)

    def _retry_waiting(self, now: float) -> None:
        """Members that are only reconnecting must not fail an update."""
        for rid, wait in list(self._waiting.items()):
            missing = self._missing(wait.body.policy)
            if missing is None:
                del self._waiting[rid]
                self.publish(wait.client, wait.entry, wait.body, now)
            elif wait.until <= now:
                del self._waiting[rid]
                self._context.refuse(wait.client, rid, refusal(*missing))
        unrecorded, self._unrecorded = self._unrecorded, []
        for update, ready in unrecorded:
            self._record(update, ready, now)

    def _missing(self, policy: str) -> tuple[str, str] | None:
        """(error code, message) of what an update cannot do without; None if all is here."""
        if self._context.members.store() is None:
            return "no_store", "no weight store is connected; start one with `rolloutbus store`"
        if not self._context.members.workers(policy):
            return "not_ready", f"no worker serves policy {policy!r}; start one and publish again"
        return None

    def _catch_up(self, worker: MemberRecord, version: int, now: float) -> None:
        worker.is_catching_up = True
        worker.retry_update_at = now + CATCH_UP_RETRY_S
        self._context.count("catch_ups")
        update = self._new(PublishVersion(worker.policy, version), now + CATCH_UP_S)
        self._prepare(update, [worker], now)

    def _new(self, body: PublishVersion, deadline_at: float) -> Update:
        self._n += 1
        # Unique for ever: a member must not mistake it for an update of an earlier router.
        return Update(f"update-{self._context.instance[:8]}-{self._n}", body, deadline_at)

    def _prepare(self, update: Update, targets: list[MemberRecord], now: float) -> None:
        store = self._context.members.store()
        bulk = store.hello.store.bulk if store and store.hello.store else ""
        update.targets = [member.name for member in targets]
        body = pack(PrepareUpdate(update.body.policy, update.body.version, bulk))

        def done(results: Results, silent: list[str], at: float) -> None:
            self._prepared(update, results, silent, at)

        name = f"{update.name}.p"
        command = MemberCommand(name, "prepare_update", body, update.deadline_at, done)
        self._fleet.start(command, targets, now)

    def _prepared(self, update: Update, results: Results, silent: list[str], now: float) -> None:
        self._note_problems(update, "prepare_update", results, silent)
        ready = [name for name in update.targets if name not in update.problems]
        if not _is_satisfied(update.body.require, len(ready), len(update.targets)):
            self._abort(update, ready, now)
        elif not update.client:  # a catch-up: the decision was recorded long ago
            update.advance("prepared")
            update.advance("recorded")
            self._commit(update, ready, now)
        else:
            update.advance("prepared")
            self._record(update, ready, now)

    def _record(self, update: Update, ready: list[str], now: float) -> None:
        def done(results: Results, silent: list[str], at: float) -> None:
            if silent and at < update.deadline_at:
                self._unrecorded.append((update, ready))  # the store will be back
            elif silent or any(outcome.kind != "finished" for outcome in results.values()):
                update.advance("not_recorded")
                update.problems["store"] = "could not record the commit"
                self._undo(update, ready, at)
            else:
                update.advance("recorded")
                self._commit(update, ready, at)

        store = self._context.members.store()
        body = pack(RecordCommit(update.body.policy, update.body.version))
        name = f"{update.name}.r"
        command = MemberCommand(name, "record_commit", body, update.deadline_at, done)
        if store is None:
            done({}, ["store"], now)
        else:
            self._fleet.start(command, [store], now)

    def _commit(self, update: Update, ready: list[str], now: float) -> None:
        body = update.body
        packed = pack(CommitUpdate(body.policy, body.version, body.in_flight))

        def one(member: MemberRecord, outcome: WorkerOutcome, at: float) -> None:
            self._committed_one(update, member, outcome, at)

        def done(results: Results, silent: list[str], at: float) -> None:
            self._committed_all(update, results, silent, at)

        name = f"{update.name}.c"
        command = MemberCommand(name, "commit_update", packed, update.deadline_at, done, one)
        named = (self._context.members.named(name) for name in ready)
        self._fleet.start(command, [member for member in named if member is not None], now)

    def _committed_one(
        self, update: Update, member: MemberRecord, outcome: WorkerOutcome, now: float
    ) -> None:
        """Each worker serves with the new version as soon as it has it."""
        committed = _result("commit_update", outcome)
        if isinstance(committed, Committed):
            update.stalls_ms[member.name] = committed.stall_ms
            member.version = max(member.version, committed.version)
            member.problem = ""
            self._on_change(member, now)

    def _committed_all(
        self, update: Update, results: Results, silent: list[str], now: float
    ) -> None:
        self._note_problems(update, "commit_update", results, silent)
        update.advance("done")
        body = update.body
        if body.version > self._context.committed_of(body.policy):
            self._context.committed[body.policy] = body.version
        self._close(update, now)
        if update.client:
            workers = [
                WorkerUpdate(
                    name,
                    name not in update.problems,
                    update.stalls_ms.get(name, 0.0),
                    update.problems.get(name, ""),
                )
                for name in update.targets
            ]
            published = pack(Published(body.version, workers))
            self._context.finish(update.client, update.rid, published)

    def _abort(self, update: Update, ready: list[str], now: float) -> None:
        update.advance("rule_broken")
        self._undo(update, ready, now)

    def _undo(self, update: Update, ready: list[str], now: float) -> None:
        body = pack(AbortUpdate(update.body.policy, update.body.version))
        name = f"{update.name}.a"
        command = MemberCommand(name, "abort_update", body, update.deadline_at, _ignore)
        named = (self._context.members.named(name) for name in ready)
        self._fleet.start(command, [member for member in named if member is not None], now)
        self._close(update, now)
        if update.client:
            why = "; ".join(f"{name}: {text}" for name, text in sorted(update.problems.items()))
            message = f"version {update.body.version} was not committed: {why or 'no worker'}"
            problem = Problem("update_failed", message, "failed")
            self._context.refuse(update.client, update.rid, problem, "failed")

    def _close(self, update: Update, now: float) -> None:
        if self._current.get(update.body.policy) is update:
            del self._current[update.body.policy]
        for name in update.targets:
            member = self._context.members.named(name)
            if member is not None:
                member.is_catching_up = False
                member.problem = update.problems.get(name, "")
        for worker in self._context.members.workers(update.body.policy):
            self._on_change(worker, now)

    def _note_problems(
        self, update: Update, kind: str, results: Results, silent: list[str]
    ) -> None:
        for name in silent:
            update.problems[name] = f"silent during {kind}"
        for name, outcome in results.items():
            if outcome.kind != "finished":
                update.problems[name] = problem_of(outcome, _result(kind, outcome))


def _is_satisfied(rule: str, n_ready: int, n_targets: int) -> bool:
    if rule == "all":
        return n_ready == n_targets
    if rule == "quorum":
        return n_ready * 2 > n_targets
    return n_ready > 0


def _result(kind: str, outcome: WorkerOutcome) -> object:
    """The typed body of a member's ending; None if it cannot be read."""
    entry = Entry(outcome.kind, body=outcome.body)
    try:
        return unpack_result(kind, entry) if outcome.kind == "finished" else unpack(entry)
    except RemoteProtocolError:
        return None


def _ignore(_results: Results, _silent: list[str], _now: float) -> None:
    """Workers that miss an abort drop the staged bytes at the next update."""
