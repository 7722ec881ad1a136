"""Clients' `publish_version` commands: checked, kept until members are there, answered once.

The transaction itself is `router.updates`'s.
Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Iterable

from rolloutbus.bus.wire.codec import pack, unpack, unpack_as
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.limits import MAX_MEMBERS, MAX_SENTENCE_CHARS
from rolloutbus.bus.wire.messages.control import WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    PublishVersion,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SettleVersion,
    UpdateStatus,
    VersionPublished,
    VersionRestored,
    WorkerUpdate,
)
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.bus.wire.validation import check_name, check_rid
from rolloutbus.router.context import Context, check_deadline, highest_taken, is_recorded, refusal
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.member_commands import (
    Answers,
    MemberCommand,
    MemberCommands,
    Results,
    result_of,
)
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.updates.record import COUNTS_ALL, RULES, UpdateRecord, Watcher, n_needed
from rolloutbus.router.updates.transport_plan import without_groups
from rolloutbus.router.updates.updates import Updates

MEMBERS_GRACE_S = 10.0
"""A publication waits this long for a store and a worker: longer than they need to come back to
a restarted router."""
RETRY_S = 0.5
"""Before a publication is tried again whose workers were all lost on the way."""
MAX_OPEN = 100
"""Publications under way; policies are named by clients."""


class _Publication:
    """One `publish_version` that has not been answered."""

    def __init__(self, client: str, rid: str, body: PublishVersion, deadline_at: float) -> None:
        self.client = client
        self.rid = rid
        self.body = body
        self.deadline_at = deadline_at
        self.update: UpdateRecord | None = None
        self.is_called_off = False
        self.lost: dict[str, str] = {}
        """Workers that an earlier try was told to and that were lost in it -> how."""
        self.try_at = 0.0
        self.patience_at = 0.0
        """When it is refused if its members are still missing."""


class Publications:
    """At most one per policy is under way."""

    def __init__(self, context: Context, updates: Updates) -> None:
        self._context = context
        self._updates = updates
        self._open: dict[str, _Publication] = {}
        self._answered = Answers()

    def publish(self, publisher: ClientRecord, entry: Entry, now: float) -> None:
        """Answer `publish_version`, for the first time or again, once it has ended."""
        context, client = self._context, publisher.name
        body = unpack_as(PublishVersion, entry)
        malformed = (
            check_rid(entry.rid, client=client)
            or check_deadline(entry)
            or check_name(body.policy, field="policy")
        )
        if malformed is not None:
            context.refuse(client, entry.rid, malformed)
            return
        answered = self._answered.get(entry.rid)
        if answered is not None:
            context.to_client(client, answered)
            return
        under_way = self._open.get(entry.rid)
        if under_way is not None:
            if under_way.update is not None:
                self._tell(under_way, under_way.update)  # what it was told may be lost
            return
        problem = self._problem_of(body)
        if problem is not None:
            context.refuse(client, entry.rid, problem)
            return
        body = without_groups(body, but_of=context.instance)
        publication = _Publication(client, entry.rid, body, now + entry.deadline_ms / 1000)
        publication.patience_at = min(publication.deadline_at, now + MEMBERS_GRACE_S)
        self._open[entry.rid] = publication
        self._try(publication, now)

    def abort(self, client: str, rids: Iterable[str], now: float) -> int:
        """Cancel the client's publications among these rids; returns how many were cancelled.

        One whose commit may be recorded goes on: its end tells what became of it.
        """
        mine = (each for rid in rids if (each := self._open.get(rid)) is not None)
        return sum(self._call_off(each, now) for each in mine if each.client == client)

    def is_under_way(self, policy: str, version: int) -> bool:
        """Whether somebody publishes this version."""
        bodies = [each.body for each in self._open.values()]
        return any((each.policy, each.version) == (policy, version) for each in bodies)

    def under_way(self, now: float) -> list[UpdateStatus]:
        """Updates under way, catching up included."""
        return self._updates.status(now)[:MAX_MEMBERS]

    def tick(self, now: float) -> None:
        """Begin what could not begin before; forget old answers."""
        for publication in list(self._open.values()):
            if publication.update is None and publication.try_at <= now:
                self._try(publication, now)
        self._answered.tick(now)

    def _problem_of(self, body: PublishVersion) -> Problem | None:
        if not body.version:
            message = "version 0 is what an engine started with; `reserve_version` gives a number"
            return refusal("bad_request", message, "version")
        if n_needed(body.require, 1) is None:
            message = f"{body.require!r} is no success rule; there are {RULES}"
            return refusal("bad_request", message, "require")
        for other in self._open.values():
            if other.body.policy == body.policy:
                message = f"version {other.body.version} is on its way; wait for it"
                return refusal("update_in_progress", message, retry_after_ms=100)
        if len(self._open) >= MAX_OPEN:
            return refusal("busy", f"{MAX_OPEN} publications are under way", retry_after_ms=1000)
        return self._staleness_of(body)

    def _staleness_of(self, body: PublishVersion) -> Problem | None:
        context = self._context
        committed, taken = context.committed_of(body.policy), highest_taken(context, body.policy)
        recorded = context.recorded.get(body.policy, 0)
        if context.members.store() is not None and recorded < body.version <= taken:
            message = (
                f"the store's record ends before version {body.version}, but this fleet has "
                f"version {taken} already, of another store or record: publish once more, which "
                "takes a number above it"
            )
            return refusal("stale_version", message, "version")
        if body.version >= committed:
            return self._problem_with_tag(body)
        message = (
            f"version {body.version} is below the committed {committed}; restore_version makes a "
            "new version of the older content"
        )
        return refusal("stale_version", message, "version")

    def _problem_with_tag(self, body: PublishVersion) -> Problem | None:
        """Labels grow with versions; the same publication may come again to another router."""
        version, last = next(reversed(self._context.tags.get(body.policy, ())), (0, -1))
        if body.tag is None or body.tag > last or (body.version, body.tag) == (version, last):
            return None
        message = (
            f"tag {body.tag} is not above {last}, the tag of version {version}: tags of a policy "
            "only grow; go on counting, or begin the run with a fleet and a store of its own"
        )
        return refusal("bad_request", message, "tag")

    def _try(self, publication: _Publication, now: float) -> None:
        body, is_late = publication.body, publication.deadline_at <= now
        stale = self._staleness_of(body)  # a store may have told more since
        if not (stale or is_late) and self._must_let_waves_end(body.policy):
            return
        if self._updates.is_in_doubt(body.policy, body.version):
            if is_late:
                self._answer(publication, "failed", _unknown(body.version), now)
            return
        missing = None if stale else self._missing(body)
        if stale is not None:
            self._answer(publication, "refused", stale, now)
        elif missing is None and is_late:
            self._end_late(publication, now)
        elif missing is None:
            self._begin(publication, now)
        elif publication.patience_at <= now:
            self._answer(publication, "refused", missing, now)

    def _end_late(self, publication: _Publication, now: float) -> None:
        """Its deadline passed before an update of it began, or began anew."""
        body, lost = publication.body, sorted(publication.lost.items())
        kind, named = "failed", f"version {body.version}"
        if is_recorded(self._context, body.policy, body.version):
            message = f"{named} is recorded, and was still on its way to workers at the deadline"
            problem = Problem("update_unknown", message, "unknown")
        elif lost:
            why = "; ".join(f"{name}: {text}" for name, text in lost)
            message = f"{named} was not committed: {why}"[:MAX_SENTENCE_CHARS]
            problem = Problem("update_failed", message, "failed")
        else:
            message = f"{named} did not begin: waves of the one before went on until its deadline"
            kind, problem = "expired", refusal("deadline", message)
        self._answer(publication, kind, problem, now)

    def _must_let_waves_end(self, policy: str) -> bool:
        """Whether waves of an earlier router are to be gone on with, or are under way."""
        if policy not in self._context.in_waves:
            return False
        return self._context.is_recovering or policy in self._updates.busy_policies()

    def _begin(self, publication: _Publication, now: float) -> None:
        def progressed(update: UpdateRecord) -> None:
            self._tell(publication, update)

        def ended(update: UpdateRecord, at: float) -> None:
            self._ended(publication, update, at)

        watcher = Watcher(progressed, ended)
        deadline_at = publication.deadline_at
        publication.update = self._updates.start(publication.body, deadline_at, watcher, now)

    def _tell(self, publication: _Publication, update: UpdateRecord) -> None:
        """How far it has come."""
        entry = Entry("update_progress", publication.rid, body=pack(update.progress))
        self._context.to_client(publication.client, entry)

    def _missing(self, body: PublishVersion) -> Problem | None:
        """What an update cannot do without."""
        if self._context.members.store() is None:
            message = "no weight store is connected; start one with `rolloutbus store`"
            return refusal("no_store", message)
        if is_recorded(self._context, body.policy, body.version):
            return None  # by an earlier router: it counts, whoever is there
        n_workers = len(self._context.members.workers(body.policy))
        if not n_workers:
            served = sorted({each.policy for each in self._context.members.workers()})
            near = nearest(body.policy, served)
            hint = f" (did you mean {near!r}?)" if near else ""
            message = f"no worker serves policy {body.policy!r}{hint}; start one and publish again"
            return refusal("not_ready", message)
        absent = self._context.expected.missing(body.policy)
        needed = n_needed(body.require, n_workers + len(absent)) or 0
        if needed > n_workers:
            message = f"{needed} workers are required; {n_workers} serve policy {body.policy!r}"
            who = "; ".join(f"{name}: {why}" for name, why in sorted(absent.items()))
            message = f"{message}; {who}" if who else message
            return refusal("not_ready", message[:MAX_SENTENCE_CHARS], "require")
        counts_all = body.require in COUNTS_ALL
        if counts_all and self._context.is_recovering and not self._context.expected.are_told:
            message = "the router has just begun, and does not know yet which workers there are"
            return refusal("not_ready", message, "require")
        return None

    def _call_off(self, publication: _Publication, now: float) -> bool:
        publication.is_called_off = True
        if publication.update is None:
            self._answer(publication, "cancelled", None, now)
        elif not self._updates.call_off(publication.update, now):
            publication.is_called_off = False
        return publication.is_called_off

    def _ended(self, publication: _Publication, update: UpdateRecord, now: float) -> None:
        if update.state == "committed":
            published = VersionPublished(
                update.body.version, self._how_it_went(publication, update)
            )
            self._answer(publication, "finished", published, now)
        elif publication.is_called_off:
            self._answer(publication, "cancelled", None, now)
        elif update.state == "unknown":
            self._answer(publication, "failed", _unknown(update.body.version), now)
        elif update.met_only_silence and now < update.prepare_until:
            # Nobody said no: the workers were lost, or this router was frozen for too long.
            publication.update = None
            publication.lost.update(update.problems)
            publication.body = without_groups(publication.body)
            publication.try_at = now + RETRY_S
            publication.patience_at = publication.deadline_at
        else:
            why = "; ".join(f"{name}: {text}" for name, text in sorted(update.problems.items()))
            message = f"version {update.body.version} was not committed: {why or 'no worker'}"
            problem = Problem("update_failed", message[:MAX_SENTENCE_CHARS], "failed")
            self._answer(publication, "failed", problem, now)

    def _how_it_went(self, publication: _Publication, update: UpdateRecord) -> list[WorkerUpdate]:
        """Results of all workers: targets, missing, lost, and those that joined meanwhile."""
        went = {name: _worker_update(update, name) for name in update.targets}
        for name, why in {**publication.lost, **update.absent}.items():
            problem = f"{why}; it catches up when it is back"
            went.setdefault(name, WorkerUpdate(name, is_active=False, problem=problem))
        for worker in self._context.members.workers(update.body.policy):
            if worker.name not in update.targets and worker.version < update.body.version:
                problem = "it joined during the update; it catches up"
                went[worker.name] = WorkerUpdate(worker.name, is_active=False, problem=problem)
        return list(went.values())[:MAX_MEMBERS]

    def _answer(
        self,
        publication: _Publication,
        kind: str,
        body: Problem | VersionPublished | None,
        now: float,
    ) -> None:
        raw = NO_BODY if body is None else pack(body)
        answer = Entry(kind, publication.rid, body=raw)
        self._answered.keep(answer, now)
        del self._open[publication.rid]
        self._context.to_client(publication.client, answer)


def _unknown(version: int) -> Problem:
    message = f"the store has not said whether it recorded version {version}; settle_version asks"
    return Problem("update_unknown", message, "unknown")


def _worker_update(update: UpdateRecord, name: str) -> WorkerUpdate:
    """How it went on one worker."""
    problem, way, prepared = (
        update.problems.get(name, ""),
        update.ways.get(name),
        update.prepared.get(name),
    )
    why = way.why if way is not None else ""
    if prepared is not None and not prepared.transport:
        why = "it had the version already"
    elif prepared is not None:
        why = prepared.why or why
    return WorkerUpdate(
        name,
        not problem,
        update.stalls_ms.get(name, 0.0),
        problem,
        prepared.transport if prepared is not None else "",
        prepared.moved_bytes if prepared is not None else 0,
        why,
    )


SETTLE_S = 10.0
MAX_PER_CLIENT = 16
"""Of one client; the oldest are the store's to give up."""
MAX_ABANDONED = 1000

Key = tuple[str, int]


class Reservations:
    """Versions that clients have reserved and that are not committed yet."""

    def __init__(self, context: Context, fleet: MemberCommands, publications: Publications) -> None:
        self._context = context
        self._fleet = fleet
        self._publications = publications
        self._by_client: dict[str, list[Key]] = {}
        self._abandoned: dict[Key, None] = {}
        for kind in ("reserve_version", "restore_version", "settle_version"):
            fleet.watch(kind, self._heard)

    def client_gone(self, client: str) -> None:
        """Note the versions of a client that has left; the next ticks give them back."""
        for key in self._by_client.pop(client, []):
            if len(self._abandoned) < MAX_ABANDONED:
                self._abandoned[key] = None

    def tick(self, now: float) -> None:
        """Give back what was abandoned and is not being published."""
        store = self._context.members.store()
        if store is None:
            return
        for key in list(self._abandoned):
            if not self._publications.is_under_way(*key):
                del self._abandoned[key]
                self._settle(key, store, now)

    def _settle(self, key: Key, store: MemberRecord, now: float) -> None:
        def done(_results: Results, silent: list[str], _now: float) -> None:
            if silent:
                self._abandoned[key] = None

        self._context.count("versions_given_back")
        rid = self._context.next_name("settle")
        body = pack(SettleVersion(*key))
        command = MemberCommand(rid, "settle_version", body, now + SETTLE_S, done)
        self._fleet.start(command, [store], now)

    def _heard(
        self, command: Entry, _member: MemberRecord, outcome: WorkerOutcome, _now: float
    ) -> None:
        """The store has answered a client."""
        client = command.rid.rpartition("/")[0]
        asked, found = unpack(command), result_of(command.kind, outcome)
        mine = self._by_client.get(client, [])
        if isinstance(asked, SettleVersion) and outcome.kind == "finished" and found is not None:
            if (asked.policy, asked.version) in mine:
                mine.remove((asked.policy, asked.version))
        elif isinstance(asked, ReserveVersion | RestoreVersion) and isinstance(
            found, Reserved | VersionRestored
        ):
            if self._context.clients.named(client) is None:
                self._abandoned[asked.policy, found.version] = None
            else:
                self._by_client[client] = [*mine, (asked.policy, found.version)][-MAX_PER_CLIENT:]
