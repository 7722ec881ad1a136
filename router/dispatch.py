"""What clients ask of the router for a `generate`: submitted, placed, aborted, acknowledged.

Spec: docs/protocol.md, "Commands".
"""

import heapq
from collections import defaultdict

import msgspec

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, AttemptList, Problem, Queued
from rolloutbus.bus.wire.messages.generation import Abort, Generate
from rolloutbus.bus.wire.validation import TOKEN_BYTES, cost_of
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.health.health import Health
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.pinned import absence_of, lateness_of
from rolloutbus.router.placement.placement import Placer, made_concrete
from rolloutbus.router.placement.sessions import Sessions
from rolloutbus.router.requests.admission_control import (
    AdmissionControl,
    HeaderValidation,
    is_sound,
)
from rolloutbus.router.requests.queue import LaneKey
from rolloutbus.router.requests.reattachment import Reattachment
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

MOST_NAMED = 8
STRANGER_S = 10.0
"""A request waits so long for a policy that nobody here knows, while others are served."""


class Dispatcher:
    """The client side of the request table, and placement."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        validation: HeaderValidation,
        health: Health,
        sessions: Sessions,
        admission: AdmissionControl,
        *,
        reattachment: Reattachment,
        placer: Placer,
    ) -> None:
        self._context = context
        self._out = context.out
        self._table = table
        self._health = health
        self._sessions = sessions
        self._admission = admission
        self._reattachment = reattachment
        self._placer = placer
        self._validation = validation
        self._strange_since: dict[str, float] = {}
        """Policies that requests wait for and that nobody here knows: since when they do."""

    def submit(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """A `generate` arrives, for the first time or again."""
        known = self._table.get(entry.rid)
        if known is not None:
            self._submitted_again(known, client, entry)
            return
        may_run = self._may_run_elsewhere(entry)
        problem = self._validation.problem_of(client, entry)
        if problem is None and entry.place is not None and entry.place.worker and not may_run:
            problem = absence_of(self._context, entry.place)
        if problem is not None and problem.code == "busy" and may_run:
            return
        if problem is not None:
            self._context.count("busy_refused" if problem.code == "busy" else "bad_requests")
            self._context.to_client(client.name, Entry("refused", entry.rid, body=pack(problem)))
            return
        request = self._made(client, entry, now, may_run=may_run)
        if self._is_ordinary(request.place, request.rule):
            self._table.add(request)
            if not self._place(request, now):
                self._table.waiting.add(request, is_tried=True)
            return
        if request.place.outlives_client and not self._may_be_detached(request):
            return
        if self._health.is_watching and not self._health.admitted(request):
            return
        if request.place.session and self._sessions.is_used:
            self._sessions.attach(request, request.place)
        waiting = self._table.waiting
        lane = None if waiting.is_empty else waiting.lane(request)
        if lane is None and request.state == "queued" and self._place(request, now):
            self._table.add(request)
        elif waiting.is_empty or self._admission.admits(request, lane, now):
            self._table.add(request)
            waiting.add(request, is_tried=True)
        elif request.session is not None:
            request.session.ended(request.rid)
        if request.place.outlives_client:
            self._context.detached.follow(request.rid, client.peer, has_prompt=True)

    def submit_run(self, client: ClientRecord, entries: list[Entry], first: int, now: float) -> int:
        """Place equal `generate`s from `entries[first]` on; returns the index of the first left.

        Nearly all that comes is a run of like entries, the samples of one prompt. What is the same
        for all of them is looked at once: the calls cost more than the work. Whoever is not
        ordinary, or finds no place, is left to `submit`, which does the same for each.
        """
        context, table, place = self._context, self._table, entries[first].place
        if place is None or self._validation.problem_of(client, entries[first]) is not None:
            return first
        rule = self._validation.rule(place.versions)
        if rule is not None:
            rule = self._context.numbered(place.policy, rule)
        if place.cost <= 0 or not self._is_ordinary(place, rule):
            return first
        committed = context.committed_of(place.policy)
        told = place if rule is None else made_concrete(place, rule, committed)
        choose, send = self._placer.chooser(place, rule), context.out.send
        name, principal, known = client.name, client.principal, table.by_rid
        for at in range(first, len(entries)):
            entry = entries[at]
            rid, deadline_ms, body = entry.rid, entry.deadline_ms, entry.body
            if (
                entry.place != place
                or entry.kind != "generate"
                or rid in known
                or not is_sound(client, entry)
            ):
                return at
            deadline_at = now + deadline_ms / 1000
            request = Request(rid, name, principal, place, "sent", rule, body, deadline_at)
            worker = choose(request, now)
            if worker is None:
                return at
            attempt = context.next_attempt()
            table.n_arrived = request.order = table.n_arrived + 1
            known[rid] = request
            table.dispatched(request, worker, attempt, now)
            out = Entry("generate", rid, attempt, worker.epoch, name, deadline_ms, told, body)
            send(worker.peer, out)
        return len(entries)

    def acked(self, client: ClientRecord, entry: Entry, body: Ack) -> None:
        """The client has these endings: forget the requests, free the worker's outbox.

        Raises:
            RemoteProtocolError: one of them is not the client's own; nothing was freed.
        """
        if not _are_own(client, body):
            msg = "ack: items: a client acknowledges its own requests"
            raise RemoteProtocolError(msg)
        self._table.acknowledged(body.items)
        member = self._context.members.named(entry.route.removeprefix("worker:"))
        if member is not None:
            self._context.to_member(member, "ack", entry.body)

    def abort(self, client: ClientRecord, body: Abort) -> int:
        """Stop requests of a client; each gets its own ending. Returns how many were found."""
        name, rids = client.name, dict.fromkeys(body.rids)
        if body.everything:
            found = [r for r in self._table if r.client == name]
        else:
            named = (self._table.get(rid) for rid in rids)
            found = [r for r in named if r is not None and r.client == name]
        n_in_doubt = self._reattachment.abort(
            lambda r: r.client == name and (body.everything or r.rid in rids)
        )
        return self._stop(found) + n_in_doubt

    def abort_policy(self, policy: str) -> int:
        """Stop the requests of all clients for a policy. Returns how many were found."""
        n_in_doubt = self._reattachment.abort(lambda each: each.place.policy == policy)
        found = [each for each in self._table if each.place.policy == policy]
        return self._stop(found) + n_in_doubt

    def _stop(self, found: list[Request]) -> int:
        at_worker: defaultdict[str, list[str]] = defaultdict(list)
        for request in found:
            if request.state == "queued":
                self._table.cancel(request)
            elif request.state == "parked":
                request.is_aborted = True  # a worker that claims it is told
            elif request.state != "ended":
                request.is_aborted = True
                at_worker[request.worker].append(request.rid)
        for name, rids in at_worker.items():
            member = self._context.members.named(name)
            if member is not None:
                self._context.to_member(member, "abort", pack(Abort(rids)))
        return len(found)

    def client_gone(self, client: ClientRecord) -> None:
        """A client stayed silent too long or left: stop its work, forget its requests."""
        self._sessions.client_gone(client.name)
        fenced: defaultdict[str, AttemptList] = defaultdict(list)
        mine = [r for r in self._table if r.client == client.name]
        for request in [each for each in mine if not each.place.outlives_client]:
            if request.worker:
                fenced[request.worker].append((request.rid, request.attempt))
            self._table.unload(request)
            self._table.forget(request)
        for name, items in fenced.items():
            self._table.fence(self._context.members.named(name), items, "client gone")

    def dispatch_waiting(self, now: float) -> None:
        """Place the waiting requests that a worker has room for, in order."""
        waiting, eligibility = self._table.waiting, self._context.eligibility
        if waiting.is_empty or not (eligibility.has_changed or waiting.is_untried):
            return  # whoever waits was turned down by these very workers
        eligibility.has_changed = waiting.is_untried = False
        ranked = waiting.ranked()
        while ranked:
            rank, key = ranked[0]
            now_rank = waiting.next_rank(key)
            if now_rank is None:
                heapq.heappop(ranked)
            elif now_rank != rank:  # the last one of this lane went, or one of its client's
                heapq.heapreplace(ranked, (now_rank, key))
            elif not self._place_first(key, now):
                heapq.heappop(ranked)

    def tick(self, now: float) -> None:
        """Time passes: refuse the late, report the queued, re-send the unconfirmed."""
        waiting, sent = self._table.waiting, self._table.sent
        if waiting.is_empty and not sent:
            return
        self._look_for_strangers(now)
        for request in waiting:
            if request.deadline_at <= now or self._is_hopeless(request, now):
                self._expire(request)
        self.dispatch_waiting(now)
        for client, rids in _unreported([*waiting, *sent.values()]).items():
            self._context.to_client(client, Entry("queued", body=pack(Queued(rids))))
        for request in [r for r in sent.values() if r.resend_at <= now]:
            member = self._context.members.named(request.worker)
            if member is not None:
                request.n_sent += 1
                request.resend_at = now + self._context.settings.leases.resend_after(request.n_sent)
                self._send(request, member, now)

    def recovered(self, now: float) -> None:
        """Queue the requests that no worker claimed in time; the aborted ones among them end."""
        for request in [r for r in self._table if r.state == "parked"]:
            request.advance("recovered")
            request.may_run_elsewhere = request.place.outlives_client  # at a worker that is cut off
            if request.is_aborted:
                self._table.cancel(request)
            else:
                self._table.waiting.add(request)
        self._table.waiting.is_untried = True  # what is committed is known as well as ever
        self.dispatch_waiting(now)

    def _is_ordinary(self, place: Placement, rule: VersionRule | None) -> bool:
        """Whether a new request needs nothing but a worker that is free now."""
        return (
            self._health.is_calm
            and not (place.resend or place.outlives_client)
            and not (place.session and self._sessions.is_used)
            and not place.worker
            and (rule is None or self._may_be_judged(rule))
        )

    def _may_be_judged(self, rule: VersionRule) -> bool:
        """Whether this router knows the versions that the rule is about."""
        if rule.needs_committed:
            return not self._context.may_miss_commits
        return rule.kind != "min-tag"

    def _may_run_elsewhere(self, entry: Entry) -> bool:
        """Whether a worker that this router does not hear may have what a client sends again.

        It has told a recovering router nothing yet, or it was cut off with a detached request. Such
        a request is never refused for want of room or of a worker: that would say that nobody has
        begun it. What there is no room for stays unanswered, and its client sends it again.
        """
        place = entry.place
        if place is None:
            return False
        if place.resend and (self._context.is_recovering or place.outlives_client):
            return True
        return self._reattachment.may_run(entry.rid)

    def _may_be_detached(self, request: Request) -> bool:
        """Whether a detached request is taken; one that is over has come late, and is dropped."""
        context = self._context
        if request.rid in context.detached.over:
            context.count("late_copies")
            return False
        if context.detached.is_full and not request.may_run_elsewhere:
            problem = refusal("busy", "too many detached requests are held", retry_after_ms=1000)
            context.refuse(request.client, request.rid, problem)
        return not context.detached.is_full

    def _made(self, client: ClientRecord, entry: Entry, now: float, *, may_run: bool) -> Request:
        place = entry.place or Placement("")
        if place.cost <= 0:
            place = msgspec.structs.replace(place, cost=_cost_in(entry))
        rule = None if place.versions == "any" else self._validation.rule(place.versions)
        self._table.n_arrived = order = self._table.n_arrived + 1
        return Request(
            entry.rid,
            client.name,
            client.principal,
            place,
            "parked" if may_run and self._context.is_recovering else "queued",
            rule,
            entry.body,
            now + entry.deadline_ms / 1000,
            order,
            may_run_elsewhere=may_run,
        )

    def _place_first(self, key: LaneKey, now: float) -> bool:
        request = self._table.waiting.first(key)
        if request is None:
            return False
        if request.ends_at_least(now) >= request.deadline_at:  # it would run for nothing
            self._expire(request)
            return True
        if not self._place(request, now):
            return False
        self._table.waiting.served(request, now)
        return True

    def _submitted_again(self, known: Request, client: ClientRecord, entry: Entry) -> None:
        if known.client != client.name:
            message = "another client uses this rid"
            self._context.refuse(client.name, entry.rid, refusal("duplicate_rid", message, "rid"))
            return
        if known.place.outlives_client:
            self._context.detached.follow(known.rid, client.peer, has_prompt=True)
            _keep_prompt(known, entry, self._validation, self._context)
        if known.state == "running":
            if self._sessions.is_used and known.session is None and entry.place is not None:
                self._sessions.attach(known, entry.place)  # adopted: its worker did not say
            body = pack(Accepted([(known.rid, known.attempt)]))
            self._context.out.send(client.peer, Entry("accepted", route=known.worker, body=body))
        elif known.state != "ended":
            known.is_reported = False

    def _place(self, request: Request, now: float) -> bool:
        rule, table = request.rule, self._table
        if rule is not None:
            rule = request.rule = self._context.numbered(request.place.policy, rule)
            if not self._may_be_judged(rule):
                return False
        worker = self._placer.choose(request, now)
        if worker is None:
            return False
        request.advance("dispatched")
        table.dispatched(request, worker, self._context.next_attempt(), now)
        if self._health.is_watching:
            self._health.placed(request, worker)
        self._send(request, worker, now)
        return True

    def _send(self, request: Request, worker: MemberRecord, now: float) -> None:
        left_ms = round((request.deadline_at - now) * 1000)
        place = request.place
        rule = request.rule
        if rule is not None:
            place = made_concrete(place, rule, self._context.committed_of(place.policy))
        self._out.send(
            worker.peer,
            Entry(
                "generate",
                request.rid,
                request.attempt,
                worker.epoch,
                request.client,
                left_ms if left_ms > 0 else 1,  # a worker takes anything else for "no deadline"
                place,
                request.body,
            ),
        )

    def _look_for_strangers(self, now: float) -> None:
        """Notes policies that waiting requests name and that are not known here.

        Where no policy is known at all, clients are there before the first worker.
        """
        known = set[str]() if self._context.is_recovering else self._context.known_policies()
        wanted = {each.place.policy for each in self._table.waiting} if known else set[str]()
        since = self._strange_since
        self._strange_since = {policy: since.get(policy, now) for policy in wanted - known}

    def _is_hopeless(self, request: Request, now: float) -> bool:
        """Whether the request waits for a policy, a version or a worker that will not come."""
        if request.may_run_elsewhere:
            return False  # a refusal says that nobody has begun it
        if self._strange_since.get(request.place.policy, now) + STRANGER_S <= now:
            return True
        if request.place.worker and absence_of(self._context, request.place) is not None:
            return True
        return request.rule is not None and self._is_retired(request)

    def _is_retired(self, request: Request) -> bool:
        """Whether it waits for weights that can never be here again."""
        committed = self._context.committed_of(request.place.policy)
        return request.rule is not None and request.rule.is_retired(committed)

    def _expire(self, request: Request) -> None:
        request.advance("expired")
        policy = request.place.policy
        committed = self._context.committed_of(policy)
        is_served = self._context.eligibility.can_serve(policy, request.rule, committed)
        if policy in self._strange_since:
            problem = self.strangeness(policy)
        elif request.place.worker:
            problem = absence_of(self._context, request.place)
            problem = problem or lateness_of(self._context, request)
        else:
            problem = _lateness(request, is_served=is_served, instead=self._who_is_there(request))
        if request.rule is not None and request.rule.is_retired(committed):
            problem = _retirement(request, committed)
        if request.may_run_elsewhere:
            message = "no worker took it in time; one that this router does not hear may have it"
            problem = Problem("deadline", message, "unknown")
        kind = "expired" if problem.code == "deadline" else "refused"
        self._context.refuse(request.client, request.rid, problem, kind)
        self._table.forget(request)

    def strangeness(self, policy: str, field: str = "place.policy") -> Problem:
        """The error for a policy that no worker serves; the name may be misspelt."""
        known = _some([repr(each) for each in sorted(self._context.known_policies())])
        message = f"no worker of policy {policy!r} is here or expected; there are {known}"
        return refusal("unknown_policy", message, field)

    def _who_is_there(self, request: Request) -> str:
        """Why no worker of the policy took a request, for the error of a client that waited."""
        context = self._context
        workers = {each.name: each for each in context.members.workers(request.place.policy)}
        if workers:
            names = sorted(workers, key=lambda name: (len(name), name))
            states = [workers[name].shown_state for name in names]
            hint = "; `resume` lets it go on" if "paused" in states else ""
            if request.rule is not None:
                states = [
                    f"{state} with version {workers[name].version}"
                    for name, state in zip(names, states, strict=True)
                ]
            told = [f"{name} is {state}" for name, state in zip(names, states, strict=True)]
            return _some(told) + hint
        return "no worker is here at all"


def _some(words: list[str]) -> str:
    """No more of them than a message has room for."""
    rest = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _cost_in(entry: Entry) -> int:
    """Computes a request's cost from its body; the router decodes no other body."""
    try:
        body = unpack(entry)
    except RemoteProtocolError:
        body = None  # its worker says what is wrong with it
    return cost_of(body) if isinstance(body, Generate) else max(1, len(entry.body) // TOKEN_BYTES)


def _are_own(client: ClientRecord, body: Ack) -> bool:
    own = client.rid_prefix
    for rid, _ in body.items:  # twice as fast as all()
        if not rid.startswith(own):
            return False
    return not body.over or all(rid.startswith(own) for rid in body.over)


def _keep_prompt(
    known: Request, entry: Entry, validation: HeaderValidation, context: Context
) -> None:
    """A detached one that was found at its worker may have to be begun again without its client."""
    if known.state == "running" and known.body == NO_BODY and entry.place is not None:
        known.body, known.rule = entry.body, validation.rule(entry.place.versions)
        known.place = msgspec.structs.replace(known.place, worker=entry.place.worker)
        known.deadline_at = context.detached.now + entry.deadline_ms / 1000


def _unreported(requests: list[Request]) -> dict[str, list[str]]:
    """Client -> rids not reported to it yet; they count as reported from now on."""
    told: defaultdict[str, list[str]] = defaultdict(list)
    for request in requests:
        if not request.is_reported:
            request.is_reported = True
            told[request.client].append(request.rid)
    return told


def _retirement(request: Request, committed: int) -> Problem:
    """Why no worker will ever have the weights."""
    message = (
        f"policy {request.place.policy!r} is at version {committed}, and no worker goes back to "
        f"{request.place.versions}; publish it anew with `restore`, which gives it a new number"
    )
    return refusal("version_unavailable", message, "place.versions")


def _lateness(request: Request, *, is_served: bool, instead: str) -> Problem:
    """Why the deadline passed while it waited."""
    policy = request.place.policy
    if is_served:
        return refusal("deadline", "it waited for a free worker until too late for its deadline")
    if request.rule is None:
        message = f"no worker of policy {policy!r} was ready before the deadline: {instead}"
        return refusal("deadline", message)
    message = f"no worker served policy {policy!r} at {request.place.versions} before the deadline"
    message += f": {instead}"
    return refusal("version_unavailable", message, "place.versions")
