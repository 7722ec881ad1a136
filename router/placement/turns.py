"""The stage of open sessions: each turn goes to the worker where the session has its place.

Spec: docs/protocol.md, "Sessions".
"""

from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.placement.affinity import Affinity, may_queue_at
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.placement.prefixes import PrefixIndex
from rolloutbus.router.placement.sessions import LEAVING, Sessions
from rolloutbus.router.requests.queue import WaitingRoom
from rolloutbus.router.requests.record import Request, SessionRecord

PATIENCE_S = 1.0
"""A turn waits so long for a worker that may be back at any moment: after a pause of the fleet or
a weight update workers return one by one, and the first one is not to get every session."""


class SessionTurns:
    """Places the requests of open sessions."""

    def __init__(
        self,
        context: Context,
        waiting: WaitingRoom,
        sessions: Sessions,
        affinity: Affinity,
        prefixes: PrefixIndex,
    ) -> None:
        self._context = context
        self._waiting = waiting
        self._sessions = sessions
        self._affinity = affinity
        self._prefixes = prefixes

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """A worker for a request of an open session, or None; its place goes along."""
        session, sessions = request.session, self._sessions
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
            sessions.move(session, worker.name, self._reason(request, session))
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
            worker = self._sessions.places.least_filled(
                each
                for each in eligibility.workers(session.policy)
                if self._context.may_serve(each, request.rule) and may_queue_at(each)
            )
            if worker is not None and request.place.marks:
                worker = self._prefixes.warmest(request, worker)
        if worker is not None:
            self._context.count("session_turns")
            if not request.is_waiting and not self._waiting.is_empty:
                self._waiting.overtaken_by(request)
        return worker

    def _is_patient_with(self, session: SessionRecord, now: float) -> bool:
        if session.waits_since is None:
            session.waits_since = now
        is_patient = now - session.waits_since < PATIENCE_S
        self._sessions.is_patient |= is_patient
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
