"""Sessions that were opened: who gets a place, where the next turn goes, when a place is free.

Spec: docs/protocol.md, "Sessions".
"""

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.session import OpenSession, SessionMoved
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable
from rolloutbus.router.sessions.record import Session
from rolloutbus.router.sessions.session_slots import LEAVING, Places

SESSION_LIMIT = 100_000
"""Open at once; the places at workers bound them long before, except while recovering."""
RETRY_MS = 1000
"""A refused client waits between this and twice this: places are freed more slowly than slots."""
PATIENCE_S = 1.0
"""A turn waits so long for a worker that may be back at any moment: after a pause of the fleet or
a weight update workers return one by one, and the first one is not to get every session."""


class Sessions:
    """All open sessions."""

    def __init__(self, context: Context, table: RequestTable, chance: Chance) -> None:
        self._context = context
        self._table = table
        self._placer = table.placer
        self._chance = chance
        self._places = Places(context)
        self._sessions: dict[str, Session] = {}
        self._is_patient = False
        """A turn waits for its worker: it is to be tried again with the next tick."""
        self.is_used = False
        """Any session is open; an attribute, because each request of a session asks."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: str, body: OpenSession, now: float) -> str | Problem:
        """Give a session a place, or renew it; its worker, or why it is refused."""
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
        return session.worker

    def close(self, client: str, name: str) -> bool:
        """Free a session's place; False if this client has no such session."""
        session = self._sessions.get(name)
        if session is None:
            return self._placer.sessions.forget(name)
        if session.client != client:
            return False
        self._end(session, "closed")
        return True

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

    def choose(self, request: Request, session: Session, now: float) -> MemberRecord | None:
        """A worker for a request of an open session, or None; its place goes along."""
        place, rule = request.place, request.rule
        if session.turn == request.rid:
            worker = self._worker_for_turn(request, session, now)
        else:
            if session.state != "gone":
                self._placer.stick(session.name, session.worker)  # so that it is not forgotten
            committed = self._context.committed_of(place.policy)
            worker = self._placer.choose(place, rule, committed)
        if worker is None:
            return None
        has_moved = session.has_lost_worker or worker.name != session.worker
        if has_moved and session.state != "gone":
            self._move(session, worker.name, self._reason(request, session))
        return worker

    def worker_lost(self, worker: MemberRecord) -> None:
        """Its sessions live elsewhere now, or nowhere until somebody can take them."""
        reason = "draining" if worker.beat.state == "draining" else "lost"
        for session in self._places.at(worker.name):
            heir = self._places.least_filled(self._places.candidates(session.policy))
            if heir is None:
                session.has_lost_worker = True
            else:
                self._move(session, heir.name, reason)

    def tick(self, now: float) -> None:
        """Time passes: graces and leases end, patience too."""
        if self._is_patient:
            self._is_patient = False
            self._table.waiting.is_untried = True
        for session in list(self._sessions.values()):
            if session.state == "active":
                continue
            if session.idle_since is None:
                session.idle_since = now
            idle_s = now - session.idle_since
            if idle_s >= session.lease_s:
                self._end(session, "expired")
            elif session.state == "held" and idle_s >= session.grace_s:
                session.advance("rested")

    def counts(self) -> dict[str, int]:
        """Worker -> open sessions, for those that hold any."""
        return self._places.counts()

    def _admit(self, client: str, body: OpenSession) -> Session | Problem:
        worker = self._place_for(body)
        if isinstance(worker, Problem):
            return worker
        session = Session(body.session, client, body.policy)
        self._sessions[session.name] = session
        self.is_used = True
        self._context.count("sessions_opened")
        if body.worker and body.worker != worker:
            session.worker = body.worker
            is_there = self._context.members.named(body.worker) is not None
            self._move(session, worker, "full" if is_there else "lost")
        else:
            self._places.settle(session, worker)
            self._placer.stick(session.name, worker)
        return session

    def _place_for(self, body: OpenSession) -> str | Problem:
        """Where a new session may live: where it was, if it says so or is remembered there."""
        context = self._context
        is_absent = bool(body.worker) and context.members.named(body.worker) is None
        is_full = len(self._sessions) >= SESSION_LIMIT
        if is_absent and context.is_recovering and not is_full:
            return body.worker  # it has yet to come back
        candidates = self._places.candidates(body.policy)
        roomy = [each for each in candidates if self._places.has_room(each) and not is_full]
        wanted = body.worker or self._placer.sessions.get(body.session)
        worker = next((each for each in roomy if each.name == wanted), None)
        worker = worker or self._places.least_filled(roomy)
        if worker is not None:
            return worker.name
        if candidates:
            message = f"{len(self)} sessions are open and hold every place; open it later"
            return refusal("busy", message, retry_after_ms=self._retry_ms())
        message = f"no worker of policy {body.policy[:64]!r} is live"
        return refusal("not_ready", message, retry_after_ms=self._retry_ms())

    def _retry_ms(self) -> int:
        return RETRY_MS + int(RETRY_MS * self._chance.random())

    def _worker_for_turn(
        self, request: Request, session: Session, now: float
    ) -> MemberRecord | None:
        placer = self._placer
        eligibility = self._context.eligibility
        home = eligibility.named(session.policy, session.worker)
        if (
            home is not None
            and not session.has_lost_worker
            and _suits(self._context, home, request)
        ):
            session.waits_since = None
            worker = home if placer.may_queue_at(home) else None
        elif self._may_return(session) and self._is_patient_with(session, now):
            worker = None
        else:
            worker = self._places.least_filled(
                each
                for each in eligibility.workers(session.policy)
                if _suits(self._context, each, request) and placer.may_queue_at(each)
            )
            if worker is not None and request.place.marks:
                committed = self._context.committed_of(session.policy)
                worker = placer.warmest(request.place, request.rule, committed, worker)
        if worker is not None:
            self._context.count("session_turns")
            if not request.is_waiting and not self._table.waiting.is_empty:
                self._table.waiting.overtaken_by(request)
        return worker

    def _is_patient_with(self, session: Session, now: float) -> bool:
        if session.waits_since is None:
            session.waits_since = now
        is_patient = now - session.waits_since < PATIENCE_S
        self._is_patient |= is_patient
        return is_patient

    def _may_return(self, session: Session) -> bool:
        """Whether its worker may serve it again in a moment, with its cache."""
        worker = self._context.members.named(session.worker)
        if session.has_lost_worker or worker is None:
            return worker is None and self._context.is_recovering
        return worker.beat.state not in LEAVING and Reason.TRIPPED not in worker.blocked_by

    def _reason(self, request: Request, session: Session) -> str:
        """Why its worker could not take a request of it."""
        context = self._context
        worker = context.members.named(session.worker)
        if worker is None or session.has_lost_worker or Reason.CUT_OFF in worker.blocked_by:
            return "lost"
        if not worker.blocked_by:
            return "full" if _suits(context, worker, request) else "version"
        return "isolating" if worker.is_fit else worker.shown_state

    def _move(self, session: Session, worker: str, reason: str) -> None:
        context = self._context
        body = pack(SessionMoved(session.name, session.worker, worker, reason))
        self._places.settle(session, worker)
        self._placer.stick(session.name, worker)
        session.has_lost_worker, session.waits_since = False, None
        context.count("places_moved")
        context.to_client(session.client, Entry("session_moved", body=body))

    def _end(self, session: Session, event: str) -> None:
        session.leave(event)
        self._places.leave(session)
        del self._sessions[session.name]
        self.is_used = bool(self._sessions)
        self._context.count(f"sessions_{event}")
        if event == "closed":
            self._placer.sessions.forget(session.name)


def _suits(context: Context, worker: MemberRecord, request: Request) -> bool:
    rule = request.rule
    return rule is None or rule.accepts(worker.version, context.committed_of(worker.policy))
