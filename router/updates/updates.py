"""Weight updates as transactions: prepare everywhere, record the decision, commit in waves.

Whom to bring where, and when, is decided by others: `router.updates.publications`,
`router.updates.catch_ups`. Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Iterable, Iterator

from msgspec import Raw

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.limits import MAX_POLICIES
from rolloutbus.bus.wire.messages.control import WorkerOutcome
from rolloutbus.bus.wire.messages.membership import StoreFacts
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    Prepared,
    PrepareUpdate,
    PublishVersion,
    RecordCommit,
    UpdateStatus,
)
from rolloutbus.router.context import Context, Waves, is_recorded, store_facts, why_no_store
from rolloutbus.router.members.member_commands import (
    MemberCommand,
    MemberCommands,
    Results,
    problem_of,
    result_of,
)
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.updates.commit_record import CommitRecorder, Decision
from rolloutbus.router.updates.record import SILENT, UpdateRecord, Watcher, next_wave
from rolloutbus.router.updates.transport_plan import (
    Target,
    Way,
    plan_ways,
    without_groups,
)

TAKES_UPDATES = frozenset({"ready", "paused", "updating", "torn"})
"""Heartbeat states in which a worker can begin an update."""


def prepare_bodies(
    context: Context, update: UpdateRecord, targets: Iterable[MemberRecord], turn: int
) -> dict[str, Raw]:
    """By name; the ways are noted in the update.

    Workers that join together catch up one by one: with each `turn` other holders are asked first.
    """
    body = update.body
    store = store_facts(context) or StoreFacts("")
    update.bulk = store.bulk
    holders = [
        facts
        for member in context.members.workers(body.policy)
        if member.version == body.version and (facts := member.hello.worker) and facts.bulk
    ]
    first = turn % max(1, len(holders))
    holders = holders[first:] + holders[:first]
    share = context.delta_shares.get(body.policy)
    ways = plan_ways([*_as_targets(targets)], store, body, holders, share)
    update.ways.update(ways)
    return {
        name: pack(
            PrepareUpdate(
                policy=body.policy,
                version=body.version,
                bulk=store.bulk,
                transport=way.transport,
                sources=list(way.sources),
                mode=body.mode,
                rank=way.rank,
                world=way.world,
            )
        )
        for name, way in ways.items()
    }


def note_delta(context: Context, policy: str, way: Way | None, prepared: Prepared) -> None:
    """What a delta has cost is what the next one is expected to."""
    shares = context.delta_shares
    is_told = way is not None and way.transport == "delta" and prepared.transport
    has_room = policy in shares or len(shares) < MAX_POLICIES
    if is_told and has_room and prepared.size_bytes:
        shares[policy] = prepared.moved_bytes / prepared.size_bytes


def _as_targets(members: Iterable[MemberRecord]) -> Iterator[Target]:
    for member in members:
        facts, state = member.hello.worker, member.heartbeat.state
        if facts is not None:
            has_base = member.version > 0 and state != "torn"
            yield Target(member.name, facts, has_base, is_able=state in TAKES_UPDATES)


ABORT_S = 2.0
"""Left to tell workers that an update is over, if its own time is."""


class Updates:
    """All updates under way."""

    def __init__(self, context: Context, fleet: MemberCommands) -> None:
        self._context = context
        self._fleet = fleet
        self._open: dict[str, UpdateRecord] = {}
        self._n_catch_ups = 0
        self._records = CommitRecorder(context, fleet)

    def start(
        self, body: PublishVersion, deadline_at: float, watcher: Watcher, now: float
    ) -> UpdateRecord:
        """Bring a sealed version to every worker of its policy."""
        update = UpdateRecord(self._context.next_name("update"), body, deadline_at, now, watcher)
        # By an earlier router: there is no way back, whatever workers say to this one.
        update.is_decided = is_recorded(self._context, body.policy, body.version)
        update.absent = self._context.expected.missing(body.policy)
        self._prepare(update, self._context.members.workers(body.policy), now)
        return update

    def catch_up(self, worker: MemberRecord, version: int, timeout_s: float, now: float) -> None:
        """Bring one worker to a version that was committed before."""
        worker.is_catching_up = True
        self._n_catch_ups += 1
        # What is torn has nothing left to keep beside the new weights.
        mode = "overwrite" if worker.heartbeat.state == "torn" else "staged"
        body = PublishVersion(worker.policy, version, mode=mode)
        name = self._context.next_name("update")
        update = UpdateRecord(name, body, now + timeout_s, now, is_catch_up=True)
        self._prepare(update, [worker], now)

    def resume(self, policy: str, waves: Waves, timeout_s: float, now: float) -> None:
        """Continue waves that an earlier router began; workers that have swapped have it active."""
        body = PublishVersion(policy, waves.version, floor=waves.floor)
        name = self._context.next_name("update")
        update = UpdateRecord(name, body, now + timeout_s, now, is_decided=True)
        self._prepare(update, self._context.members.workers(policy), now)

    def call_off(self, update: UpdateRecord, now: float) -> bool:
        """Its publisher has changed its mind. False: it is too late for that."""
        if update.name not in self._open or update.is_decided:
            return False
        self._fleet.abandon(update.told)
        self._records.forget(f"{update.name}.r")
        self._abort(update, "called_off", now)
        return True

    def is_in_doubt(self, policy: str, version: int) -> bool:
        """Whether only the store knows if this version is committed."""
        return self._records.is_in_doubt(policy, version)

    def busy_policies(self) -> set[str]:
        """Policies of which a version is on its way to all workers."""
        return {each.body.policy for each in self._open.values() if not each.is_catch_up}

    def status(self, now: float) -> list[UpdateStatus]:
        """What is under way."""
        return [update.status(now) for update in self._open.values()]

    def tick(self, now: float) -> None:
        """Retry what the store could not record; see whether it is somewhere else now."""
        self._records.tick(now)
        facts = store_facts(self._context)
        for update in list(self._open.values()):
            if facts and update.state == "preparing" and update.bulk != facts.bulk:
                self._context.count("told_anew")
                update.bulk = facts.bulk
                self._prepare_anew(update, now)

    def _advance(self, update: UpdateRecord, event: str) -> None:
        update.advance(event)
        update.watcher.on_progress(update)

    def _prepare(self, update: UpdateRecord, targets: list[MemberRecord], now: float) -> None:
        self._open[update.name] = update
        update.targets = [member.name for member in targets]
        update.watcher.on_progress(update)
        self._tell_to_prepare(update, targets, now)

    def _tell_to_prepare(
        self, update: UpdateRecord, targets: list[MemberRecord], now: float
    ) -> None:
        bodies = prepare_bodies(self._context, update, targets, self._n_catch_ups)

        def one(member: MemberRecord, outcome: WorkerOutcome, _at: float) -> None:
            prepared = result_of("prepare_update", outcome)
            if isinstance(prepared, Prepared):
                update.prepared[member.name] = prepared
                way = update.ways.get(member.name)
                note_delta(self._context, update.body.policy, way, prepared)
                update.watcher.on_progress(update)

        def done(results: Results, silent: list[str], at: float) -> None:
            self._prepared(update, results, silent, at)

        name, kind = update.next_rid("p"), "prepare_update"
        command = MemberCommand(name, kind, Raw(), update.prepare_until, done, one, bodies)
        self._fleet.start(command, targets, now)

    def _prepare_anew(self, update: UpdateRecord, now: float) -> None:
        """Send workers that wait for the store its new address, after they stop waiting."""

        def stopped(_results: Results, _silent: list[str], at: float) -> None:
            here = self._still_here(update, waiting)
            self._tell_to_prepare(update, here, at)

        self._fleet.abandon(update.told)
        update.body = without_groups(update.body)  # its ranks are not told again all together
        waiting = [name for name in update.targets if name not in update.prepared]
        packed = pack(AbortUpdate(update.body.policy, update.body.version))
        name = update.next_rid("s")
        command = MemberCommand(name, "abort_update", packed, update.prepare_until, stopped)
        self._fleet.start(command, self._still_here(update, waiting), now)

    def _prepared(
        self, update: UpdateRecord, results: Results, silent: list[str], now: float
    ) -> None:
        self._note_problems(update, "prepare_update", results, silent)
        away = why_no_store(self._context, now) if silent else ""
        if away:
            update.problems["store"] = f"{SILENT}: {away}"
            for name in silent:
                update.problems[name] = f"{SILENT} during prepare_update, which needs the store"
        if not (update.satisfies_its_rule or update.is_decided):
            self._abort(update, "rule_broken", now)
            return
        self._advance(update, "prepared")
        if update.is_catch_up or update.is_decided:
            self._advance(update, "recorded")
            self._commit(update, now)
        else:
            self._record(update, now)

    def _record(self, update: UpdateRecord, now: float) -> None:
        """Have the store write that the version counts; how many are to serve meanwhile, too."""

        def asked() -> None:
            update.is_decided = True

        def written(is_so: bool | None, at: float) -> None:  # noqa: FBT001 - of OnWritten
            if is_so:
                self._context.note_tag(body.policy, body.version, body.tag)
                self._advance(update, "recorded")
                self._commit(update, at)
            else:
                self._abort(update, "no_answer" if is_so is None else "not_recorded", at)

        body = update.body
        record = RecordCommit(body.policy, body.version, body.floor, tag=body.tag)
        rid = f"{update.name}.r"
        self._records.write(Decision(rid, record, update.deadline_at, written, asked), now)

    def _commit(self, update: UpdateRecord, now: float) -> None:
        body = update.body
        if not body.floor:  # else those that wait for their turn serve
            self._context.note_commit(body.policy, body.version)
        update.left = update.ready
        self._commit_wave(update, now)

    def _commit_wave(self, update: UpdateRecord, now: float) -> None:
        """Let the next workers swap; notes each worker that has left meanwhile."""
        body = update.body
        here = {member.name: member for member in self._still_here(update, update.left)}
        fit = {w.name for w in self._context.members.workers(body.policy) if w.is_fit}
        wave = next_wave(list(here), fit, body.floor)
        update.left = [name for name in here if name not in set(wave)]

        def one(member: MemberRecord, outcome: WorkerOutcome, _at: float) -> None:
            self._committed_one(update, member, outcome)

        def done(results: Results, silent: list[str], at: float) -> None:
            self._note_problems(update, "commit_update", results, silent)
            if update.left and at < update.deadline_at:
                self._commit_wave(update, at)
            elif body.floor:
                self._end_waves(update, at)
            else:
                self._committed_all(update, at)

        packed = pack(CommitUpdate(body.policy, body.version, body.in_flight))
        name = f"{update.name}.c"
        command = MemberCommand(name, "commit_update", packed, update.deadline_at, done, one)
        self._fleet.start(command, [here[name] for name in wave], now)

    def _end_waves(self, update: UpdateRecord, now: float) -> None:
        """Have the store write that the waves are over; the version is told only after that."""

        def written(_is_so: bool | None, at: float) -> None:  # noqa: FBT001 - of OnWritten
            # If it is not, the next router ends the waves once more.
            self._committed_all(update, at)

        record = RecordCommit(update.body.policy, update.body.version)
        until = max(update.deadline_at, now + ABORT_S)
        self._records.write(Decision(f"{update.name}.w", record, until, written), now)

    def _note_problems(
        self, update: UpdateRecord, kind: str, results: Results, silent: list[str]
    ) -> None:
        for name in silent:
            why = self._context.expected.why(name)
            update.problems[name] = f"{SILENT} during {kind}{why and ': '}{why}"
        for name, outcome in results.items():
            if outcome.kind != "finished":
                update.problems[name] = problem_of(kind, outcome)

    def _still_here(self, update: UpdateRecord, names: Iterable[str]) -> list[MemberRecord]:
        """Returns the named workers that are on the bus; notes those that left since prepare."""
        here: list[MemberRecord] = []
        for name in names:
            member = self._context.members.named(name)
            if member is None or member.state == "gone":  # its next lease knows of no update
                update.problems.setdefault(name, f"{SILENT} since prepare_update")
            else:
                here.append(member)
        return here

    def _committed_one(
        self, update: UpdateRecord, member: MemberRecord, outcome: WorkerOutcome
    ) -> None:
        """Record that one worker has committed; it serves the new version at once."""
        committed = result_of("commit_update", outcome)
        if isinstance(committed, Committed):
            update.stalls_ms[member.name] = committed.stall_ms
            self._context.note_version(member, max(member.version, committed.version))
            update.watcher.on_progress(update)

    def _committed_all(self, update: UpdateRecord, now: float) -> None:
        for name in update.left:
            update.problems[name] = "its turn to commit did not come before the deadline"
        self._context.note_commit(update.body.policy, update.body.version)
        self._context.in_waves.pop(update.body.policy, None)
        self._advance(update, "done")
        self._close(update, now)

    def _abort(self, update: UpdateRecord, event: str, now: float) -> None:
        """Drop what was staged; a worker that misses this drops it at the next update."""
        here = self._still_here(update, update.targets)
        self._advance(update, event)
        if event == "not_recorded":
            update.problems["store"] = "could not record the commit"
        elif event == "no_answer":
            update.problems["store"] = "has not said whether it recorded the commit"
        packed = pack(AbortUpdate(update.body.policy, update.body.version))
        name, until = f"{update.name}.a", max(update.deadline_at, now + ABORT_S)
        self._fleet.start(
            MemberCommand(name, "abort_update", packed, until, _ignore_done), here, now
        )
        self._close(update, now)

    def _close(self, update: UpdateRecord, now: float) -> None:
        del self._open[update.name]
        for name in update.targets:
            member = self._context.members.named(name)
            if member is not None:
                member.is_catching_up = False
                member.problem = update.problems.get(name, "")
        update.watcher.on_end(update, now)


def _ignore_done(_results: Results, _silent: list[str], _now: float) -> None:
    """Ignores the answers: no party waits for this command."""
