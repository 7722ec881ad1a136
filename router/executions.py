"""What workers report about requests: begun, ended, still running, lost with their worker.

Spec: docs/protocol.md, "Delivery".
"""

from collections import defaultdict

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import NO_BODY, Attempt, Entry, Placement, RequestId
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, AttemptList, Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.router.context import Context
from rolloutbus.router.health.health import Health
from rolloutbus.router.members.member_commands import is_share
from rolloutbus.router.members.membership import EXPIRED, RENEWED
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.requests.reattachment import Reattachment
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import SETTLED, RequestTable

REFUSED_COST = 1024
"""Tokens that a request is charged which its worker refused as wrong, beside those that it named:
else whoever names few has the workers busy with refusals."""
FORGOTTEN = "forgotten by its worker"


class Executions:
    """The worker side of the request table."""

    def __init__(
        self, context: Context, table: RequestTable, health: Health, reattachment: Reattachment
    ) -> None:
        self._context = context
        self._table = table
        self._health = health
        self._reattachment = reattachment

    def accepted(self, worker: MemberRecord, body: Accepted) -> None:
        """A worker has begun these."""
        table, name = self._table, worker.name
        told: defaultdict[str, AttemptList] = defaultdict(list)
        stale: AttemptList = []
        for item in body.items:
            rid, attempt = item
            request = table.get(rid)
            if request is None or request.attempt != attempt or request.worker != name:
                stale.append(item)
            elif request.state in {"sent", "running"}:
                table.confirm(request)
                told[request.client].append(item)
        for client, items in told.items():
            body_out = pack(Accepted(items))
            self._context.to_client(client, Entry("accepted", route=name, body=body_out))
        if stale:
            table.fence(worker, stale, "not the current attempt")

    def ended(self, worker: MemberRecord, entry: Entry, now: float) -> None:
        """An ending: forward it if it is of the current attempt, else fence it."""
        request = self._table.get(entry.rid)
        if request is not None and self._health.is_calm and _is_ordinary(request, worker, entry):
            self._table.finish(request)
            self._forward(worker, entry, request.client)
            return
        if request is None and self._context.detached.is_settled(entry.rid):
            self._table.fence(worker, [(entry.rid, entry.attempt)], SETTLED)
            return
        if request is None:
            self._forward(worker, entry, entry.route)
            return
        if request.attempt != entry.attempt or request.worker != worker.name:
            never_placed = request.n_sent == 0 and request.state in {"queued", "parked"}
            if not (never_placed and request.client == entry.route):
                self._table.fence(worker, [(entry.rid, entry.attempt)], "not the current attempt")
                return
            self._table.adopt(request, worker, entry.attempt)
        is_heard = True
        if request.place.outlives_client:
            if self._is_sent_again(request, worker, entry):
                return
            is_heard = self._context.detached.is_followed(request)
        if entry.kind == "refused" and request.state != "ended" and not is_passing(entry):
            # Its client's mistake took a turn, perhaps for a cost that its worker found untrue.
            self._table.waiting.charge(request, REFUSED_COST)
        if (entry.kind == "failed" or self._health.is_watching) and request.state != "ended":
            self._health.ended(worker, entry, now)
        if entry.kind == "finished" and not self._table.waiting.is_empty:
            self._table.waiting.ran(request, now)
        self._table.finish(request)
        if is_heard:
            self._forward(worker, entry, request.client)

    def ended_run(self, worker: MemberRecord, entries: list[Entry], first: int, _now: float) -> int:
        """Forward results from `entries[first]` on; returns the index of the first one left.

        One loop for many, as `Dispatcher.submit_run`; `ended` does the same for each.
        """
        if not self._health.is_calm:
            return first
        table, worker_name, client_name = self._table, worker.name, ""
        to_client: list[Entry] = []
        for at in range(first, len(entries)):
            entry = entries[at]
            request = table.by_rid.get(entry.rid)
            if request is None or not _is_ordinary(request, worker, entry):
                return at
            table.finish(request)
            if request.client != client_name:
                client_name = request.client
                to_client = self._queue_to(client_name)
            ending = Entry(
                "finished", entry.rid, entry.attempt, "", worker_name, 0, None, entry.body
            )
            to_client.append(ending)
        return len(entries)

    def returned(self, worker: MemberRecord, entries: list[Entry]) -> None:
        """None of these entries has left: other workers get their requests at once.

        A connection that is gone shows when something is sent over it, long before a lease
        expires. Nothing new is sent to the worker until its next heartbeat.
        """
        self._context.eligibility.block(worker, Reason.CUT_OFF)
        for entry in entries:
            request = self._table.get(entry.rid) if entry.kind == "generate" else None
            is_current = request is not None and request.attempt == entry.attempt
            if request is None or not is_current or request.state != "sent" or request.n_sent > 1:
                continue  # what was sent before may have arrived
            self._context.count("undelivered")
            self._table.requeue(request, "lost")

    def reconcile(self, worker: MemberRecord) -> None:
        """Compare the table with what a worker's heartbeat says it runs."""
        heartbeat = worker.heartbeat
        if heartbeat.over:
            self._table.settle(heartbeat.over)
        if not (
            heartbeat.running or worker.kept or worker.requests or self._context.detached.requests
        ):
            return
        held = {rid for rid, _, _ in heartbeat.running}
        groups = dict(heartbeat.detached) if heartbeat.detached else {}
        groups.update((rid, group) for (rid, _), group in worker.kept.items())
        begun: AttemptList = []
        fenced: AttemptList = []
        aborted: list[str] = []
        for rid, attempt, client in self._unexpected(worker, groups):
            request = self._table.get(rid)
            if request is None and self._context.detached.is_settled(rid):
                fenced.append((rid, attempt))
                continue
            if request is None:
                request = self._found(worker, rid, client, groups)
                self._table.add(request)
                self._context.clients.miss(client, worker.heartbeat_at)
            is_unplaced = request.n_sent == 0 or (rid in groups and not request.worker)
            if is_unplaced and request.state in {"queued", "parked"}:
                self._table.adopt(request, worker, attempt)
                begun.append((rid, attempt))  # who was told that it waits must watch it now
                if request.is_aborted:
                    aborted.append(rid)
            elif request.attempt != attempt or request.worker != worker.name:
                fenced.append((rid, attempt))
            elif request.state == "sent":  # the word that it was begun has been lost
                begun.append((rid, attempt))
            elif rid in groups:
                if rid not in worker.requests:  # it goes on under a new lease
                    self._table.load(request, worker)
                if request.is_aborted:  # its client, which would repeat the abort, may be absent
                    aborted.append(rid)
        if fenced:
            self._table.fence(worker, fenced, "placed elsewhere, or over")
        if begun:
            self.accepted(worker, Accepted(begun))
        if aborted:
            self._context.to_member(worker, "abort", pack(Abort(aborted)))
        is_known = worker.has_whole_outbox
        forgotten = self._forgotten(worker, held) if worker.requests and is_known else []
        if forgotten:
            self._lose(forgotten, worker, FORGOTTEN)
        if groups or self._context.detached.requests:
            self._reconcile_kept(worker, groups, held)

    def _unexpected(
        self, worker: MemberRecord, groups: dict[str, str]
    ) -> list[tuple[str, Attempt, str]]:
        """What a heartbeat says is running and the table does not have as running there.

        Nearly all is as expected: this loop takes most of the time of a heartbeat.
        """
        found: list[tuple[str, Attempt, str]] = []
        get, name = self._table.get, worker.name
        for each in worker.heartbeat.running:
            rid, attempt, _ = each
            request = get(rid)
            if (
                request is None
                or request.state != "running"
                or request.attempt != attempt
                or request.worker != name
                or rid in groups
            ) and not is_share(rid):  # member commands answer for themselves
                found.append(each)
        return found

    def tick(self, now: float) -> None:
        """Time passes."""
        self._reattachment.tick(now)

    def member_lost(self, worker: MemberRecord, reason: str) -> None:
        """A lease is over: unconfirmed requests wait for another worker, the rest are `lost`."""
        mine = [r for r in self._table if r.worker == worker.name]
        if reason == RENEWED:  # detached ones may go on there: its first heartbeat tells
            mine = [r for r in mine if r.state == "sent" or not r.place.outlives_client]
        for request in mine if reason == EXPIRED else ():  # detached ones go on at who was cut off
            request.may_run_elsewhere = request.place.outlives_client
        unconfirmed = [r for r in mine if r.state == "sent"]
        self._lose([r for r in mine if r.state in {"running", "ended"}], worker, reason)
        for request in unconfirmed:
            self._table.requeue(request, "lost")

    def _lose(self, requests: list[Request], worker: MemberRecord, reason: str) -> None:
        """Executions are gone: their clients decide, or we do for detached ones without any."""
        if self._context.detached.requests:
            requests = [each for each in requests if not self._kept_from_loss(each, worker)]
            for request in requests:
                if request.place.outlives_client and request.state == "running":
                    self._reattachment.reported_lost(request)
        self._table.lose(requests, worker, reason)

    def _kept_from_loss(self, request: Request, worker: MemberRecord) -> bool:
        context = self._context
        if not request.place.outlives_client:
            return False
        if request.state == "running" and request.is_aborted:
            self._table.requeue(request, "requeued")  # it ends there
            return True
        if context.detached.can_resend(request):
            return False
        if request.state == "running" and request.body != NO_BODY:
            context.count("detached_requeued")
            request.is_reported = False
            self._table.requeue(request, "requeued")
            return True
        if context.detached.is_followed(request):
            return False
        message = f"worker {worker.name} was lost, and the request or its result with it"
        self._table.unload(request)
        context.refuse(
            request.client, request.rid, Problem("worker_lost", message, "unknown"), "failed"
        )
        request.advance("lost")
        self._table.forget(request)
        return True

    def _is_sent_again(self, request: Request, worker: MemberRecord, entry: Entry) -> bool:
        """Queue a detached request again that its worker did not do; its client cannot."""
        if request.state not in {"sent", "running"} or not _is_undone(request, entry):
            return False
        can_resend = self._context.detached.can_resend(request)
        if request.body == NO_BODY or can_resend:
            return False
        ack = pack(Ack([(request.rid, request.attempt)]))
        self._context.to_member(worker, "ack", ack)
        self._table.requeue(request, "lost" if request.state == "sent" else "requeued")
        return True

    def _reconcile_kept(self, worker: MemberRecord, groups: dict[str, str], held: set[str]) -> None:
        """Know the detached endings that this worker keeps, and no others of it."""
        context, table = self._context, self._table
        over: AttemptList = []
        for rid, attempt in worker.kept:
            if table.get(rid) is not None or context.detached.is_full:
                continue
            if context.detached.is_settled(rid):
                over.append((rid, attempt))
            elif not context.detached.is_collected(rid, attempt):
                client = worker.outbox[rid, attempt]
                request = self._found(worker, rid, client, groups)
                table.add(request)
                table.adopt(request, worker, attempt)
                table.finish(request)
        table.fence(worker, over, SETTLED)
        missing = [
            each
            for each in context.detached.requests.values()
            if worker.has_whole_outbox
            and each.worker == worker.name
            and each.rid not in held
            and (RequestId(each.rid), each.attempt) not in worker.outbox
        ]
        self._lose([each for each in missing if each.state == "running"], worker, FORGOTTEN)
        for request in missing:
            if request.state == "ended":
                context.count("detached_uncollected")
                request.advance("lost")
                table.forget(request)

    def _found(
        self, worker: MemberRecord, rid: str, client: str, groups: dict[str, str]
    ) -> Request:
        """The record of a request that a worker names and this router has not seen."""
        known = self._context.clients.named(client)
        principal = client if known is None else known.principal
        place = _place_of(worker, rid, groups)
        return Request(rid, client, principal, place, "queued", None, NO_BODY)

    def _forgotten(self, worker: MemberRecord, held: set[str]) -> list[Request]:
        """Requests confirmed by this worker that it neither runs nor has an ending of."""
        missing = [self._table.get(rid) for rid in sorted(worker.requests - held)]
        return [
            each
            for each in missing
            if each is not None
            and each.state == "running"
            and (RequestId(each.rid), each.attempt) not in worker.outbox
        ]

    def _queue_to(self, client: str) -> list[Entry]:
        record = self._context.clients.named(client)
        return self._context.out.queue(record.peer) if record is not None else []

    def _forward(self, worker: MemberRecord, entry: Entry, client: str) -> None:
        ending = Entry(entry.kind, entry.rid, entry.attempt, "", worker.name, 0, None, entry.body)
        self._context.to_client(client, ending)


def _is_ordinary(request: Request, worker: MemberRecord, entry: Entry) -> bool:
    """Whether this is the result of the current attempt, and nothing but a result."""
    return (
        entry.kind == "finished"
        and request.attempt == entry.attempt
        and request.worker == worker.name
        and not request.place.outlives_client
    )


def _place_of(worker: MemberRecord, rid: str, groups: dict[str, str]) -> Placement:
    """What is known of the placement of a request that a worker names; `groups` of detached."""
    if rid in groups:
        return Placement(worker.policy, group=groups[rid], outlives_client=True)
    return Placement(worker.policy)


def _is_undone(request: Request, entry: Entry) -> bool:
    """Whether its worker could not take it, or stopped it without its client's wish."""
    if entry.kind == "cancelled":
        return not request.is_aborted
    return entry.kind == "refused" and is_passing(entry)


def is_passing(entry: Entry) -> bool:
    """Whether a worker's refusal is one that time heals."""
    try:
        problem = unpack(entry)
    except RemoteProtocolError:
        return False
    return isinstance(problem, Problem) and problem.code == "not_ready"
