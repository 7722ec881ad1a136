"""Workers below the last committed version; they get no requests until they have caught up.

A late joiner, a restarted one, one that failed during an update. Adapters are brought likewise.
Spec: docs/protocol.md, "Weights", 3.
"""

from functools import partial

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import Adapters as LoadedAdapters
from rolloutbus.bus.wire.messages.control import LoadLora, UnloadLora, WorkerOutcome
from rolloutbus.bus.wire.messages.weights import RecordCommit
from rolloutbus.router.context import Context, lacking, store_facts
from rolloutbus.router.members.member_commands import (
    MemberCommand,
    MemberCommands,
    Results,
    result_of,
)
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.updates.commit_record import CommitRecorder, Decision
from rolloutbus.router.updates.updates import TAKES_UPDATES, Updates

LOAD_S = 120.0
RECORD_S = 60.0
RETRY_ADAPTER_S = 30.0
"""Before an adapter that could not be loaded is tried there again."""
ABLE = frozenset({"ready", "paused"})
CATCH_UP_S = 120.0
RETRY_S = 2.0
"""Before a worker that failed to catch up is tried again."""


class AdapterReloads:
    """Learns from clients' commands what workers are to have, and has the store remember it."""

    def __init__(self, context: Context, fleet: MemberCommands) -> None:
        self._context = context
        self._fleet = fleet
        self._records = CommitRecorder(context, fleet)
        self._wanted: dict[str, int] = {}
        """`Context.adapters`, as they were when all workers were looked at."""
        fleet.watch("load_lora", self._changed)
        fleet.watch("unload_lora", self._changed)

    def tick(self, now: float) -> None:
        """Load what is missing, one adapter of a worker at a time."""
        self._records.tick(now)
        context, store = self._context, store_facts(self._context)
        if store is None or not (context.adapters or context.may_lack):
            return
        if self._wanted != context.adapters:
            self._wanted = dict(context.adapters)
            context.may_lack.update((each.name, each) for each in context.members.workers())
        for worker in list(context.may_lack.values()):
            if worker.retry_adapters_at > now:
                continue
            missing = lacking(context, worker)
            if not missing or context.members.named(worker.name) is not worker:
                del context.may_lack[worker.name]
                if Reason.ADAPTERS in worker.blocked_by:
                    context.eligibility.unblock(worker, Reason.ADAPTERS)
            elif worker.state == "live" and worker.heartbeat.state in ABLE:
                name, version = min(missing, key=lambda each: each in worker.refused_adapters)
                self._load(worker, LoadLora(name, version, bulk=store.bulk), now)

    def _load(self, worker: MemberRecord, body: LoadLora, now: float) -> None:
        until = worker.retry_adapters_at = now + LOAD_S

        def done(results: Results, _silent: list[str], at: float) -> None:
            outcome = results.get(worker.name)
            if outcome is None or not _take(worker, "load_lora", outcome):
                self._context.count("adapters_refused")
                worker.refused_adapters.add((body.name, body.version))
            missing = set(lacking(self._context, worker))
            is_patient = missing <= worker.refused_adapters
            worker.retry_adapters_at = at + RETRY_ADAPTER_S if is_patient else at
            if is_patient:
                self._context.eligibility.unblock(worker, Reason.ADAPTERS)

        self._context.count("adapters_brought")
        rid = self._context.next_name("adapters")
        command = MemberCommand(rid, "load_lora", pack(body), until, done)
        self._fleet.start(command, [worker], now)

    def _changed(
        self, command: Entry, worker: MemberRecord, outcome: WorkerOutcome, now: float
    ) -> None:
        """A client had a worker load or drop one; what came out of the store is for all."""
        if not _take(worker, command.kind, outcome):
            return
        self._context.may_lack[worker.name] = worker
        body, adapters = unpack(command), self._context.adapters
        if isinstance(body, LoadLora) and not body.path:
            policy = f"{worker.policy}.{body.name}"
            if body.version > adapters.get(policy, 0):
                adapters[policy] = body.version
                self._record(policy, body.version, now)
        elif isinstance(body, UnloadLora):
            policy = f"{worker.policy}.{body.name}"
            if adapters.pop(policy, 0):
                self._record(policy, 0, now)

    def _record(self, policy: str, version: int, now: float) -> None:
        body = RecordCommit(policy, version, is_adapter=True)
        rid = self._context.next_name("adapters")
        decision = Decision(rid, body, now + RECORD_S, partial(self._written, body))
        self._records.write(decision, now)

    def _written(self, body: RecordCommit, is_so: bool | None, _now: float) -> None:  # noqa: FBT001 - of OnWritten
        """What the store does not keep, or has forgotten, cannot be brought to anybody."""
        adapters = self._context.adapters
        is_wanted = adapters.get(body.policy, 0) > body.version
        if not is_wanted and not (is_so and body.version):
            adapters.pop(body.policy, None)


def _take(worker: MemberRecord, kind: str, outcome: WorkerOutcome) -> bool:
    """Note what a worker has now. False: it could not do what it was asked."""
    result = result_of(kind, outcome)
    if isinstance(result, LoadedAdapters):
        worker.adapters = dict(result.adapters)
    return isinstance(result, LoadedAdapters)


class CatchUps:
    """Looks for workers that are behind."""

    def __init__(self, context: Context, updates: Updates, fleet: MemberCommands) -> None:
        self._context = context
        self._updates = updates
        self._adapters = AdapterReloads(context, fleet)

    def tick(self, now: float) -> None:
        """Start the catch-ups that can start, unless a version is on its way to all workers."""
        context = self._context
        self._adapters.tick(now)
        if context.in_waves:
            self._resume_waves(now)
        committed = context.committed
        behind = [
            worker
            for worker in context.eligibility.blocked()  # both are reasons to give it no requests
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
        """Resume waves once all workers had time to return; an absent worker is not counted at all.

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
