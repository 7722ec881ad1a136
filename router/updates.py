"""Weight updates as transactions: prepare everywhere, record the decision, commit.

A worker below the last committed version serves nobody: the router brings it up to date by
itself (a late joiner, a restarted one, one that failed during an update).
Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Callable

from bus.codec import pack, unpack, unpack_result
from bus.entry import Entry
from bus.errors import RemoteProtocolError
from bus.messages.control import WorkerOutcome
from bus.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    PrepareUpdate,
    PublishVersion,
    RecordCommit,
)
from router.context import Context, note_commit
from router.fleet import Fleet, MemberCommand, Results, problem_of
from router.members import MemberRecord
from router.update import SILENT, Update

CATCH_UP_S = 120.0
"""A single worker gets this long to pull and swap."""
CATCH_UP_RETRY_S = 2.0
"""Before a worker that failed to catch up is tried again."""


class Updates:
    """The version ledger's writer: at most one fleet update per policy at a time."""

    def __init__(
        self, context: Context, fleet: Fleet, on_change: Callable[[MemberRecord, float], None]
    ) -> None:
        self._context = context
        self._fleet = fleet
        self._on_change = on_change
        self._current: dict[str, Update] = {}
        self._unrecorded: list[Update] = []
        """Prepared updates whose decision the store could not take yet."""
        self._n = 0

    def start(
        self,
        body: PublishVersion,
        deadline_at: float,
        on_end: Callable[[Update, float], None],
        now: float,
    ) -> None:
        """Bring a sealed version to every worker of its policy."""
        update = Update(self._name(), body, deadline_at, on_end)
        self._current[body.policy] = update
        self._prepare(update, self._context.members.workers(body.policy), now)

    def tick(self, now: float) -> None:
        """Retry what the store could not record; bring workers that fell behind up to date."""
        unrecorded, self._unrecorded = self._unrecorded, []
        for update in unrecorded:
            self._record(update, now)
        context = self._context
        if context.members.store() is None:
            return
        for worker in context.members.workers():
            committed = context.committed_of(worker.policy)
            if worker.version >= committed or worker.state != "live":
                continue
            can_update = worker.beat.state in {"ready", "paused", "updating"}
            is_idle = not worker.is_catching_up and worker.policy not in self._current
            if can_update and is_idle and worker.retry_update_at <= now:
                self._catch_up(worker, committed, now)

    def _catch_up(self, worker: MemberRecord, version: int, now: float) -> None:
        worker.is_catching_up = True
        worker.retry_update_at = now + CATCH_UP_RETRY_S
        self._context.count("catch_ups")
        body = PublishVersion(worker.policy, version)
        update = Update(self._name(), body, now + CATCH_UP_S, _ignore_end, is_catch_up=True)
        self._prepare(update, [worker], now)

    def _name(self) -> str:
        self._n += 1
        return f"update-{self._context.instance[:8]}-{self._n}"

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
        _note_problems(update, "prepare_update", results, silent)
        if not update.satisfies_its_rule:
            update.advance("rule_broken")
            self._undo(update, now)
            self._close(update, now)
            return
        update.advance("prepared")
        if update.is_catch_up:
            update.advance("recorded")
            self._commit(update, now)
        else:
            self._record(update, now)

    def _record(self, update: Update, now: float) -> None:
        def done(results: Results, silent: list[str], at: float) -> None:
            if silent and at < update.deadline_at:
                self._unrecorded.append(update)  # the store will be back
            elif silent or any(outcome.kind != "finished" for outcome in results.values()):
                update.advance("not_recorded")
                self._undo(update, at)
                update.problems["store"] = "could not record the commit"
                self._close(update, at)
            else:
                update.advance("recorded")
                self._commit(update, at)

        store = self._context.members.store()
        body = pack(RecordCommit(update.body.policy, update.body.version))
        name = f"{update.name}.r"
        command = MemberCommand(name, "record_commit", body, update.deadline_at, done)
        if store is None:
            done({}, ["store"], now)
        else:
            self._fleet.start(command, [store], now)

    def _commit(self, update: Update, now: float) -> None:
        body = update.body
        packed = pack(CommitUpdate(body.policy, body.version, body.in_flight))

        def one(member: MemberRecord, outcome: WorkerOutcome, at: float) -> None:
            self._committed_one(update, member, outcome, at)

        def done(results: Results, silent: list[str], at: float) -> None:
            self._committed_all(update, results, silent, at)

        name = f"{update.name}.c"
        command = MemberCommand(name, "commit_update", packed, update.deadline_at, done, one)
        self._fleet.start(command, self._still_here(update), now)

    def _still_here(self, update: Update) -> list[MemberRecord]:
        """Prepared workers that are on the bus; who left meanwhile is noted."""
        here: list[MemberRecord] = []
        for name in update.ready:
            member = self._context.members.named(name)
            if member is None:
                update.problems[name] = f"{SILENT} since prepare_update"
            else:
                here.append(member)
        return here

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
        _note_problems(update, "commit_update", results, silent)
        update.advance("done")
        note_commit(self._context.committed, update.body.policy, update.body.version)
        self._close(update, now)

    def _undo(self, update: Update, now: float) -> None:
        """Drop what was staged; a worker that misses this drops it at the next update."""
        body = pack(AbortUpdate(update.body.policy, update.body.version))
        name = f"{update.name}.a"
        command = MemberCommand(name, "abort_update", body, update.deadline_at, _ignore_done)
        self._fleet.start(command, self._still_here(update), now)

    def _close(self, update: Update, now: float) -> None:
        if self._current.get(update.body.policy) is update:
            del self._current[update.body.policy]
        for name in update.targets:
            member = self._context.members.named(name)
            if member is not None:
                member.is_catching_up = False
                member.problem = update.problems.get(name, "")
        workers = self._context.members.workers(update.body.policy)
        # Whoever is behind now goes first, or else it would get what waits.
        for worker in sorted(workers, key=self._context.is_serving):
            self._on_change(worker, now)
        update.on_end(update, now)


def _note_problems(update: Update, kind: str, results: Results, silent: list[str]) -> None:
    for name in silent:
        update.problems[name] = f"{SILENT} during {kind}"
    for name, outcome in results.items():
        if outcome.kind != "finished":
            update.problems[name] = problem_of(outcome, _result(kind, outcome))


def _result(kind: str, outcome: WorkerOutcome) -> object:
    """The typed body of a member's ending; None if it cannot be read."""
    entry = Entry(outcome.kind, body=outcome.body)
    try:
        return unpack_result(kind, entry) if outcome.kind == "finished" else unpack(entry)
    except RemoteProtocolError:
        return None


def _ignore_done(_results: Results, _silent: list[str], _now: float) -> None:
    """Nobody waits for it."""


def _ignore_end(_update: Update, _now: float) -> None:
    """A catch-up shows in the worker's version."""
