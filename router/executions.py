"""What workers report about requests: begun, ended, still running, lost with their worker.

Spec: docs/protocol.md, "Delivery".
"""

from collections import defaultdict

from bus.codec import pack
from bus.entry import Entry, Placement
from bus.ids import NO_ATTEMPT
from bus.messages.delivery import Accepted, AttemptList
from router.context import Context
from router.fleet import is_share
from router.health import Health
from router.members import MemberRecord
from router.requests import Request
from router.table import RequestTable


class Executions:
    """The worker side of the request table."""

    def __init__(self, context: Context, table: RequestTable, health: Health) -> None:
        self._context = context
        self._table = table
        self._health = health

    def accepted(self, worker: MemberRecord, body: Accepted) -> None:
        """A worker has begun these."""
        told: defaultdict[str, AttemptList] = defaultdict(list)
        stale: AttemptList = []
        for rid, attempt in body.items:
            request = self._table.get(rid)
            if request is None or request.attempt != attempt or request.worker != worker.name:
                stale.append((rid, attempt))
            elif request.state in {"sent", "running"}:
                self._table.confirm(request)
                told[request.client].append((rid, attempt))
        for client, items in told.items():
            body_out = pack(Accepted(items))
            self._context.to_client(client, Entry("accepted", route=worker.name, body=body_out))
        self._table.fence(worker, stale, "not the current attempt")

    def ended(self, worker: MemberRecord, entry: Entry, now: float) -> None:
        """An ending: forward it if it is of the current attempt, else fence it."""
        request = self._table.get(entry.rid)
        if request is None:
            self._forward(worker, entry, entry.route)
            return
        if request.attempt != entry.attempt or request.worker != worker.name:
            never_placed = request.n_sent == 0 and request.state in {"queued", "parked"}
            if not (never_placed and request.client == entry.route):
                self._table.fence(worker, [(entry.rid, entry.attempt)], "not the current attempt")
                return
            self._table.adopt(request, worker, entry.attempt)
        if (entry.kind == "failed" or self._health.is_watching) and request.state != "ended":
            self._health.ended(worker, entry, now)
        self._table.finish(request)
        self._forward(worker, entry, request.client)

    def reconcile(self, worker: MemberRecord) -> None:
        """Compare the table with what a worker's beat says it runs."""
        beat = worker.beat
        held = {rid for rid, _, _ in beat.outbox}
        fenced: AttemptList = []
        for rid, attempt, client in beat.running:
            if is_share(rid):
                continue  # member commands answer for themselves
            held.add(rid)
            request = self._table.get(rid)
            if request is None:
                request = Request(rid, client, Placement(worker.policy), "queued")
                self._table.add(request)
            if request.n_sent == 0 and request.state in {"queued", "parked"}:
                self._table.adopt(request, worker, attempt)
            elif request.attempt != attempt or request.worker != worker.name:
                fenced.append((rid, attempt))
        self._table.fence(worker, fenced, "placed elsewhere")
        self._table.lose(self._forgotten(worker, held), worker, "forgotten by its worker")

    def member_lost(self, worker: MemberRecord, reason: str) -> None:
        """A lease is over: unconfirmed requests wait for another worker, the rest are `lost`."""
        self._table.placer.update(worker, is_serving=False)
        mine = [r for r in self._table if r.worker == worker.name]
        unconfirmed = [r for r in mine if r.state == "sent"]
        self._table.lose([r for r in mine if r.state in {"running", "ended"}], worker, reason)
        for request in unconfirmed:
            self._table.unload(request)
            self._table.sent.pop(request.rid, None)
            request.advance("lost")
            request.worker, request.attempt = "", NO_ATTEMPT
            self._table.waiting.add(request)

    def _forgotten(self, worker: MemberRecord, held: set[str]) -> list[Request]:
        """Requests confirmed by this worker that it neither runs nor has an ending of."""
        missing = [self._table.get(rid) for rid in sorted(worker.requests - held)]
        return [r for r in missing if r is not None and r.state == "running"]

    def _forward(self, worker: MemberRecord, entry: Entry, client: str) -> None:
        ending = Entry(entry.kind, entry.rid, entry.attempt, "", worker.name, 0, None, entry.body)
        self._context.to_client(client, ending)
