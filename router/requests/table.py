"""The request table: every `generate` the router knows, and what each worker carries of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, NO_BODY, Attempt, Entry
from rolloutbus.bus.wire.messages.endings import AttemptList, Fenced, Lost
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.requests.queue import Bounds, RequestQueue
from rolloutbus.router.requests.record import Request

SETTLED = "its client has an end of it, or it was aborted"
"""Why the execution of a detached request is stopped that nobody wants any more."""


class RequestTable:
    """Requests by rid; keeps the workers' loads in step with them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._eligibility = context.eligibility
        self.by_rid: dict[str, Request] = {}
        self.get: Callable[[str], Request | None] = self.by_rid.get
        self.n_arrived = 0
        """Requests that came from clients; what each is ordered by."""
        settings = context.settings
        bounds = Bounds(settings.queue_limit, settings.queue_bytes, settings.client_weights)
        self.waiting = RequestQueue(bounds)
        self.resend_first_s = settings.leases.resend_first_s
        self.sent: dict[str, Request] = {}
        """Placed and not yet confirmed, oldest first."""

    def __len__(self) -> int:
        return len(self.by_rid)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival; a copy, so that requests may be forgotten meanwhile."""
        return iter(list(self.by_rid.values()))

    def add(self, request: Request) -> None:
        """A new request."""
        self.by_rid[request.rid] = request
        if request.place.outlives_client:
            self._context.detached.add(request)

    def forget(self, request: Request) -> None:
        """The request leaves the table."""
        self.waiting.remove(request)
        self.sent.pop(request.rid, None)
        self.by_rid.pop(request.rid, None)
        if request.place.outlives_client:
            self._context.detached.remove(request)
        if request.session is not None:
            request.session.ended(request.rid)

    def dispatched(
        self, request: Request, worker: MemberRecord, attempt: Attempt, now: float
    ) -> None:
        """The request goes to this worker; its attempt begins."""
        request.attempt = attempt
        request.worker = worker.name
        request.n_sent = 1
        request.sent_at, request.resend_at = now, now + self.resend_first_s
        self.sent[request.rid] = request
        self.load(request, worker)

    def load(self, request: Request, worker: MemberRecord) -> None:
        """The worker carries this request from now on."""
        worker.requests.add(request.rid)
        worker.outstanding_cost += request.place.cost
        if len(worker.requests) >= worker.slots:
            self._eligibility.filled(worker)

    def unload(self, request: Request) -> None:
        """The worker carries it no more."""
        worker = self._context.members.named(request.worker)
        if worker is None or request.rid not in worker.requests:
            return
        had_no_slot = len(worker.requests) >= worker.slots
        worker.requests.discard(request.rid)
        worker.outstanding_cost -= request.place.cost
        if had_no_slot or worker.blocked_by:
            self._eligibility.freed(worker)

    def finish(self, request: Request) -> None:
        """An ending came, for the first time or again; the record waits for the client's ack."""
        if request.state != "ended":
            self.unload(request)
            self.sent.pop(request.rid, None)
            request.body = NO_BODY
            if request.session is not None:
                request.session.ended(request.rid)
        request.advance("ended")

    def acknowledged(self, items: AttemptList) -> None:
        """Clients have these endings: their requests leave the table.

        One that waits was sent again to a restarted router while its ending, which a worker had
        kept, was on its way to the client. A client that wants it all the same sends it once more.
        """
        by_rid, detached = self.by_rid, self._context.detached
        for rid, attempt in items:
            request = by_rid.get(rid)
            if request is None:  # perhaps a detached one, kept by a worker that is away
                detached.acked(rid, attempt)
            elif request.attempt == attempt and request.state == "ended":
                request.advance("acked")
                del by_rid[rid]
                if request.place.outlives_client:
                    detached.collected(request)
            elif request.is_waiting and not request.place.outlives_client:
                request.advance("acked")
                self.forget(request)

    def confirm(self, request: Request) -> None:
        """The worker has begun: the router needs the body no more."""
        request.advance("accepted")
        if not (request.is_suspect or request.place.outlives_client):
            request.body = NO_BODY
        self.sent.pop(request.rid, None)

    def adopt(self, request: Request, worker: MemberRecord, attempt: Attempt) -> None:
        """A worker already runs this (the router was restarted): take its word."""
        self.waiting.remove(request)
        request.attempt = attempt
        request.worker = worker.name
        request.n_sent = 1
        if not request.place.outlives_client:
            request.body = NO_BODY
        request.advance("adopted")
        self.load(request, worker)
        self._context.count("adopted")

    def lose(self, requests: Iterable[Request], worker: MemberRecord, reason: str) -> None:
        """Executions are gone with their worker: tell each client once, forget them."""
        told: defaultdict[str, AttemptList] = defaultdict(list)
        for request in requests:
            self.unload(request)
            told[request.client].append((request.rid, request.attempt))
            request.advance("lost")
            self.forget(request)
        for client, items in told.items():
            self._context.count("lost", len(items))
            body = pack(Lost(items, worker.name, reason))
            self._context.to_client(client, Entry("lost", route=worker.name, body=body))

    def requeue(self, request: Request, event: str) -> None:
        """Its worker did not keep it: it waits for another one, unless it was aborted."""
        self.unload(request)
        self.sent.pop(request.rid, None)
        request.advance(event)
        request.worker, request.attempt = "", NO_ATTEMPT
        if request.is_aborted:
            self.cancel(request)
        else:
            self.waiting.add(request)

    def cancel(self, request: Request) -> None:
        """End a request here that was aborted and that no worker has."""
        request.advance("aborted")
        if request.place.outlives_client:
            self._context.detached.keep_unheard(request, "cancelled", None)
        self.forget(request)
        self._context.to_client(request.client, Entry("cancelled", request.rid))

    def settle(self, rids: Iterable[str]) -> None:
        """These detached requests have ended for their callers: drop them, and stop their workers.

        Clients say so, and workers for clients that may be dead.
        """
        fenced: defaultdict[str, AttemptList] = defaultdict(list)
        for rid in rids:
            self._context.detached.end_for_good(rid)
            request = self._context.detached.requests.get(rid)
            if request is None:
                continue
            if request.worker:
                fenced[request.worker].append((rid, request.attempt))
            self.unload(request)
            self.forget(request)
        for name, items in fenced.items():
            self.fence(self._context.members.named(name), items, SETTLED)

    def fence(self, worker: MemberRecord | None, items: AttemptList, reason: str) -> None:
        """Tell a worker that these executions are not its own any more."""
        if worker is not None and items:
            self._context.count("fenced", len(items))
            self._context.to_member(worker, "fenced", pack(Fenced(items, reason)))
