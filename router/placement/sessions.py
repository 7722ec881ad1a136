"""Open sessions: which worker holds each, where the next turn goes, when a slot is free.

Spec: docs/protocol.md, "Sessions".
"""

from collections.abc import Iterable
from itertools import islice

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.timetable import Timetable
from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)
from rolloutbus.bus.wire.validation import check_name
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.placement.affinity import Affinity, may_queue_at
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.placement.prefixes import PrefixIndex
from rolloutbus.router.requests.record import Request, SessionRecord
from rolloutbus.router.requests.table import RequestTable

LEAVING = frozenset({"draining", "broken"})
"""Heartbeat states of a worker that will not come back as it is."""

PATIENCE_S = 1.0
"""A turn waits so long for a worker that may be back at any moment: after a pause of the fleet or
a weight update workers return one by one, and the first one is not to get every session."""


N_COMPARED = 8
"""Of workers that are equally full of sessions, so many are compared by their other work."""


class SessionSlots:
    """The sessions at each worker; never more than `sessions_per_slot` lets in, unless moved."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._per_slot = context.settings.sessions_per_slot
        self._at: dict[str, dict[str, SessionRecord]] = {}
        self._roomy: dict[str, dict[float, dict[str, MemberRecord]]] = {}
        """Policy -> fill -> workers that take requests and may hold one session more."""
        context.eligibility.on_change = self._file

    def settle(self, session: SessionRecord, worker: str) -> None:
        """The session has its place at this worker from now on."""
        self.leave(session)
        session.worker = worker
        self._at.setdefault(worker, {})[session.name] = session
        self._file_named(worker)

    def leave(self, session: SessionRecord) -> None:
        """The session's place is free."""
        there = self._at.get(session.worker)
        if there is not None:
            there.pop(session.name, None)
            if not there:
                del self._at[session.worker]
            self._file_named(session.worker)

    def at(self, worker: str) -> list[SessionRecord]:
        """The sessions that this worker holds; a copy."""
        return list(self._at.get(worker, {}).values())

    def counts(self) -> dict[str, int]:
        """Worker -> sessions, for those that hold any."""
        return {worker: len(there) for worker, there in self._at.items()}

    def candidates(self, policy: str) -> list[MemberRecord]:
        """Workers that may hold sessions: those that serve; if none does, all that may again."""
        return self._context.eligibility.workers(policy) or [
            each
            for each in self._context.members.workers(policy)
            if each.state == "live" and each.heartbeat.state not in LEAVING
        ]

    def with_room(self, policy: str, wanted: str = "") -> MemberRecord | None:
        """The wanted worker if one session more may be opened there, or else the least filled.

        It does not look at all workers, for there may be 1,000, unless none serves.
        """
        eligibility = self._context.eligibility
        if not eligibility.can_serve(policy, None, 0):
            roomy = {each.name: each for each in self.candidates(policy) if self._has_room(each)}
            return roomy.get(wanted) or self.least_filled(roomy.values())
        there = eligibility.named(policy, wanted)
        if there is not None and there.session_fill is not None:
            return there
        by_fill = self._roomy.get(policy)
        if by_fill is None:
            return None
        alike = islice(by_fill[min(by_fill)].values(), N_COMPARED)
        return min(alike, key=lambda each: each.outstanding_cost)

    def _has_room(self, worker: MemberRecord) -> bool:
        n_held = len(self._at.get(worker.name, ()))
        return n_held < max(1, int(worker.slots * self._per_slot))

    def _file_named(self, name: str) -> None:
        worker = self._context.members.named(name)
        if worker is not None and worker.role == "worker":
            self._file(worker)

    def _file(self, worker: MemberRecord) -> None:
        """File a worker by its fill, if it takes requests and has room; else nowhere."""
        fill: float | None = None
        if not worker.blocked_by and self._has_room(worker):
            fill = len(self._at.get(worker.name, ())) / (worker.slots or 1)
        before = worker.session_fill
        if fill == before:
            return
        by_fill = self._roomy.setdefault(worker.policy, {})
        if before is not None:
            del by_fill[before][worker.name]
            if not by_fill[before]:
                del by_fill[before]
        if fill is not None:
            by_fill.setdefault(fill, {})[worker.name] = worker
        worker.session_fill = fill
        if not by_fill:  # policies are named by workers
            del self._roomy[worker.policy]

    def least_filled(self, workers: Iterable[MemberRecord]) -> MemberRecord | None:
        """Returns the worker that holds the fewest sessions for its size."""
        held = self._at

        def fill(worker: MemberRecord) -> tuple[float, int]:
            n_held = len(held.get(worker.name, ()))
            return n_held / (worker.slots or 1), worker.outstanding_cost

        return min(workers, key=fill, default=None)


SESSION_LIMIT = 100_000
"""Open at once; the places at workers bound them long before, except while recovering."""
MAX_SESSION_S = 86_400.0
"""A lease or a grace of a session lasts a day at most."""
RETRY_MS = 1000
"""A refused client waits between this and twice this: places are freed more slowly than slots."""


class Sessions:
    """All open sessions, and their stage of placement."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        affinity: Affinity,
        prefixes: PrefixIndex,
        chance: Chance,
    ) -> None:
        self._context = context
        self._table = table
        self._affinity = affinity
        self._prefixes = prefixes
        self._chance = chance
        self.places = SessionSlots(context)
        self._sessions: dict[str, SessionRecord] = {}
        self._busy: dict[str, SessionRecord] = {}
        """Those that had a request under way at the last tick or since."""
        self._due: Timetable[str] = Timetable()
        """When the grace or the lease of each idle session ends: there may be 100,000."""
        self.is_patient = False
        """A turn waits for its worker: it is to be tried again with the next tick."""
        self.is_used = False
        """Any session is open; an attribute, because each request of a session asks."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: ClientRecord, entry: Entry, now: float) -> None:
        """Answer `open_session`: give a session a place, or renew it."""
        body = unpack_as(OpenSession, entry)
        opened = _problem_of(body) or self._opened(client.name, body, now)
        if isinstance(opened, Problem):
            self._context.refuse(client.name, entry.rid, opened)
        else:
            self._context.finish(client.name, entry.rid, pack(OpenedSession(opened)))

    def close(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Answer `close_session`: free its place."""
        name = unpack_as(CloseSession, entry).session
        session = self._sessions.get(name)
        if session is None and self._affinity.sessions.forget(name):
            self._context.finish(client.name, entry.rid)
        elif session is not None and session.client == client.name:
            self._end(session, "closed")
            self._context.finish(client.name, entry.rid)
        else:
            problem = refusal("unknown_session", f"session {name[:64]!r} is not open", "session")
            self._context.refuse(client.name, entry.rid, problem)

    def _opened(self, client: str, body: OpenSession, now: float) -> str | Problem:
        """The worker of the session, or why it is refused."""
        session = self._sessions.get(body.session)
        if session is None:
            admitted = self._admit(client, body)
            if isinstance(admitted, Problem):
                self._context.count("sessions_refused")
                return admitted
            session = admitted
        elif session.client != client:
            message = f"session {body.session[:64]!r} is another client's"
            return refusal("session_taken", message, "session", self._retry_ms())
        session.lease_s, session.grace_s = body.lease_s, body.grace_s
        session.advance("opened")
        session.idle_since = now
        if session.state != "active":
            self._schedule(session, now)
        return session.worker

    def client_gone(self, client: str) -> None:
        """Free the places of a client that is here no more."""
        for session in [each for each in self._sessions.values() if each.client == client]:
            self._end(session, "closed")

    def attach(self, request: Request, place: Placement) -> None:
        """A request that names a session came; if its client has opened it, it belongs to it."""
        session = self._sessions.get(place.session)
        if session is None or session.client != request.client or session.policy != place.policy:
            return
        request.session = session
        session.begin(request.rid)
        self._busy[session.name] = session
        self._due.cancel(session.name)

    def worker_lost(self, worker: MemberRecord) -> None:
        """Its sessions live elsewhere now, or nowhere until somebody can take them."""
        reason = "draining" if worker.heartbeat.state == "draining" else "lost"
        for session in self.places.at(worker.name):
            heir = self.places.with_room(session.policy)
            heir = heir or self.places.least_filled(self.places.candidates(session.policy))
            if heir is None:
                session.has_lost_worker = True
            else:
                self.move(session, heir.name, reason)

    def tick(self, now: float) -> None:
        """Time passes: graces and leases end, patience too."""
        if self.is_patient:
            self.is_patient = False
            self._table.waiting.is_untried = True
        for session in [each for each in self._busy.values() if each.state != "active"]:
            del self._busy[session.name]
            if session.idle_since is None:
                session.idle_since = now
            self._schedule(session, session.idle_since)
        for name in self._due.due(now):
            session = self._sessions[name]
            idle_since = session.idle_since
            assert idle_since is not None  # those that were busy are not scheduled
            if now >= idle_since + session.lease_s:
                self._end(session, "expired")
            else:
                session.advance("rested")
                self._schedule(session, idle_since)

    def _schedule(self, session: SessionRecord, idle_since: float) -> None:
        """Look at an idle session again when its grace ends, or else its lease."""
        is_held = session.state == "held"
        wait_s = min(session.grace_s, session.lease_s) if is_held else session.lease_s
        self._due.set(session.name, idle_since + wait_s)

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """A worker for a request of an open session, or None; its place goes along."""
        session = request.session
        if session is None:
            return rest(request, now)
        if session.turn == request.rid:
            worker = self._worker_for_turn(request, session, now)
        else:
            if session.state != "gone":
                self._affinity.stick(session.name, session.worker)  # so that it is not forgotten
            worker = rest(request, now)
        if worker is None:
            return None
        has_moved = session.has_lost_worker or worker.name != session.worker
        if has_moved and session.state != "gone":
            self.move(session, worker.name, self._reason(request, session))
        return worker

    def _worker_for_turn(
        self, request: Request, session: SessionRecord, now: float
    ) -> MemberRecord | None:
        eligibility = self._context.eligibility
        home = eligibility.named(session.policy, session.worker)
        if (
            home is not None
            and not session.has_lost_worker
            and self._context.may_serve(home, request.rule)
        ):
            session.waits_since = None
            worker = home if may_queue_at(home) else None
        elif self._may_return(session) and self._is_patient_with(session, now):
            worker = None
        else:
            worker = self.places.least_filled(
                each
                for each in eligibility.workers(session.policy)
                if self._context.may_serve(each, request.rule) and may_queue_at(each)
            )
            if worker is not None and request.place.marks:
                worker = self._prefixes.warmest(request, worker)
        if worker is not None:
            self._context.count("session_turns")
            if not request.is_waiting and not self._table.waiting.is_empty:
                # It went before all who wait: its client pays for that like for any other turn.
                self._table.waiting.charge(request, request.place.cost)
        return worker

    def _is_patient_with(self, session: SessionRecord, now: float) -> bool:
        if session.waits_since is None:
            session.waits_since = now
        is_patient = now - session.waits_since < PATIENCE_S
        self.is_patient |= is_patient
        return is_patient

    def _may_return(self, session: SessionRecord) -> bool:
        """Whether its worker may serve it again in a moment, with its cache."""
        worker = self._context.members.named(session.worker)
        if session.has_lost_worker or worker is None:
            return worker is None and self._context.is_recovering
        return worker.heartbeat.state not in LEAVING and Reason.TRIPPED not in worker.blocked_by

    def _reason(self, request: Request, session: SessionRecord) -> str:
        """Why its worker could not take a request of it."""
        context = self._context
        worker = context.members.named(session.worker)
        if worker is None or session.has_lost_worker or Reason.CUT_OFF in worker.blocked_by:
            return "lost"
        if not worker.blocked_by:
            return "full" if context.may_serve(worker, request.rule) else "version"
        return "isolating" if worker.is_fit else worker.shown_state

    def _admit(self, client: str, body: OpenSession) -> SessionRecord | Problem:
        worker = self._place_for(body)
        if isinstance(worker, Problem):
            return worker
        session = SessionRecord(body.session, client, body.policy)
        self._sessions[session.name] = session
        self.is_used = True
        self._context.count("sessions_opened")
        if body.worker and body.worker != worker:
            session.worker = body.worker
            is_there = self._context.members.named(body.worker) is not None
            self.move(session, worker, "full" if is_there else "lost")
        else:
            self.places.settle(session, worker)
            self._affinity.stick(session.name, worker)
        return session

    def _place_for(self, body: OpenSession) -> str | Problem:
        """Where a new session may live: where it was, if it says so or is remembered there."""
        context = self._context
        is_absent = bool(body.worker) and context.members.named(body.worker) is None
        is_full = len(self._sessions) >= SESSION_LIMIT
        if is_absent and context.is_recovering and not is_full:
            return body.worker  # it has yet to come back
        wanted = body.worker or self._affinity.sessions.get(body.session) or ""
        worker = None if is_full else self.places.with_room(body.policy, wanted)
        if worker is not None:
            return worker.name
        if context.eligibility.can_serve(body.policy, None, 0) or self.places.candidates(
            body.policy
        ):
            message = f"{len(self)} sessions are open and hold every place; open it later"
            return refusal("busy", message, retry_after_ms=self._retry_ms())
        message = f"no worker of policy {body.policy[:64]!r} is live"
        return refusal("not_ready", message, retry_after_ms=self._retry_ms())

    def _retry_ms(self) -> int:
        return RETRY_MS + int(RETRY_MS * self._chance.random())

    def move(self, session: SessionRecord, worker: str, reason: str) -> None:
        """The session lives at this worker from now on; its client hears why."""
        context = self._context
        body = pack(SessionMoved(session.name, session.worker, worker, reason))
        self.places.settle(session, worker)
        self._affinity.stick(session.name, worker)
        session.has_lost_worker, session.waits_since = False, None
        context.count("places_moved")
        context.to_client(session.client, Entry("session_moved", body=body))

    def _end(self, session: SessionRecord, event: str) -> None:
        session.advance(event)
        if session.turn:  # its requests are like any other's from now on
            session.turn = ""
            self._table.waiting.is_untried = True
        self.places.leave(session)
        del self._sessions[session.name]
        self._busy.pop(session.name, None)
        self._due.cancel(session.name)
        self.is_used = bool(self._sessions)
        self._context.count(f"sessions_{event}")
        if event == "closed":
            self._affinity.sessions.forget(session.name)


def _problem_of(body: OpenSession) -> Problem | None:
    """Which limit an `open_session` breaks."""
    problem = check_name(body.session, field="session") or check_name(body.policy, field="policy")
    if problem is None and body.worker:
        problem = check_name(body.worker, field="worker")
    if problem is None and not 0 < body.lease_s <= MAX_SESSION_S:
        problem = refusal(
            "bad_request", f"a lease is above 0 and at most {MAX_SESSION_S:.0f} s", "lease_s"
        )
    if problem is None and not 0 <= body.grace_s <= MAX_SESSION_S:
        problem = refusal(
            "bad_request", f"a grace is at least 0 and at most {MAX_SESSION_S:.0f} s", "grace_s"
        )
    return problem
