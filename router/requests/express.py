"""The express lane: runs of ordinary requests, and of their results, each in one loop.

Nearly all that comes is a run of like entries: the `generate`s of one client for one prompt, the
`finished` of one worker. What is the same for all of a run is looked at once, and nothing is called
that an ordinary request does not need: the calls cost more than the work. Whatever is not ordinary
ends the run and goes through `Dispatcher.submit` or `Executions.ended`, entry by entry. Those could
take the ordinary ones too: which way an entry went shows in nothing but the time it took.
"""

from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.router.context import Context
from rolloutbus.router.health.health import Health
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import made_concrete
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable
from rolloutbus.router.requests.validation import Admission
from rolloutbus.router.sessions.sessions import Sessions


class Express:
    """Takes as much of a batch as is ordinary."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        admission: Admission,
        health: Health,
        sessions: Sessions,
    ) -> None:
        self._context = context
        self._table = table
        self._admission = admission
        self._health = health
        self._sessions = sessions

    def submitted(self, client: ClientRecord, entries: list[Entry], first: int, now: float) -> int:
        """Place new `generate`s, from `entries[first]` on; returns the index of who is left."""
        context, table, place = self._context, self._table, entries[first].place
        if place is None or not self._may_place(client, entries[first], place):
            return first
        rule = self._admission.rule(place.versions)
        if rule is not None and rule.needs_committed and context.may_miss_commits:
            return first
        committed = context.committed_of(place.policy)
        told = place if rule is None else made_concrete(place, rule, committed)
        choose, send = table.placer.chooser(place, rule, committed), context.out.send
        name, match_rid, known = client.name, client.match_rid, table.by_rid
        principal = client.principal
        for at in range(first, len(entries)):
            entry = entries[at]
            rid, deadline_ms, body = entry.rid, entry.deadline_ms, entry.body
            if (
                entry.place != place
                or entry.kind != "generate"
                or rid in known
                or deadline_ms <= 0
                or entry.route
                or match_rid(rid) is None
            ):
                return at
            worker = choose()
            if worker is None:
                return at
            attempt = context.next_attempt()
            request = Request(rid, name, place, "sent", rule, body)  # it never waited
            request.principal = principal
            request.deadline_at = now + deadline_ms / 1000
            table.n_arrived = request.order = table.n_arrived + 1
            known[rid] = request
            table.dispatched(request, worker, attempt, now)
            out = Entry("generate", rid, attempt, worker.epoch, name, deadline_ms, told, body)
            send(worker.peer, out)
        return len(entries)

    def finished(self, worker: MemberRecord, entries: list[Entry], first: int, _now: float) -> int:
        """Forward results, from `entries[first]` on; returns the index of who is left."""
        if not self._is_calm:
            return first
        table, worker_name, client_name = self._table, worker.name, ""
        to_client: list[Entry] = []
        for at in range(first, len(entries)):
            entry = entries[at]
            rid, attempt = entry.rid, entry.attempt
            request = table.by_rid.get(rid)
            if (
                request is None
                or entry.kind != "finished"
                or request.attempt != attempt
                or request.worker != worker_name
                or request.place.outlives_client
            ):
                return at
            table.finish(request)
            if request.client != client_name:
                client_name = request.client
                to_client = self._queue_to(client_name)
            to_client.append(Entry("finished", rid, attempt, "", worker_name, 0, None, entry.body))
        return len(entries)

    @property
    def _is_calm(self) -> bool:
        """Nobody waits and nobody is watched."""
        return self._table.waiting.is_empty and not self._health.is_watching

    def _queue_to(self, client: str) -> list[Entry]:
        record = self._context.clients.named(client)
        return self._context.out.queue(record.peer) if record is not None else []

    def _may_place(self, client: ClientRecord, entry: Entry, place: Placement) -> bool:
        """Whether a request like this one needs nothing but a worker that is free now."""
        return (
            self._is_calm
            and place.cost > 0
            and not (place.resend or place.outlives_client)
            and not (place.session and self._sessions.is_used)
            and self._admission.problem_of(client, entry) is None
        )
