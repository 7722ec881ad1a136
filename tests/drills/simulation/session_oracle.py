"""What must be true of sessions: whoever opened one is told of each move of its place, once.

It compares where one router has the sessions now with where it had them and what it has said since.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, cast

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.generation import OpenSession, SessionMoved
from rolloutbus.router.core import RouterCore
from rolloutbus.router.requests.record import SessionRecord
from tests.drills.simulation.peeks import sessions_of


class Place(NamedTuple):
    """Where a session was when it was looked at last."""

    session: SessionRecord
    worker: str
    epoch: str
    """Lease of that worker; empty while it is away."""
    is_bereft: bool
    """That worker has forgotten it, which is told when its next turn comes."""


class Told(NamedTuple):
    """One move, as its client was told of it."""

    move: SessionMoved
    epoch: str
    """Lease of the worker that it moved to, at that moment."""


class SessionOracle:
    """Looks after the sessions of one router."""

    def __init__(self, core: RouterCore, broken: Callable[[str], None]) -> None:
        self._core, self._broken = core, broken
        self._known: dict[str, Place] = {}
        self._claims: dict[str, str] = {}
        """Session -> the worker that its client named when it opened it again, at first: copies
        of what it had said on earlier connections may follow."""
        self._told: defaultdict[SessionRecord, list[Told]] = defaultdict(list)
        """By the opening that it was said of: a session may be closed and opened meanwhile."""

    def heard(self, entry: Entry) -> None:
        """A client opens a session."""
        body = cast("OpenSession", unpack(entry))
        self._claims.setdefault(body.session, body.worker)

    def told(self, peer: Peer, entry: Entry) -> None:
        """The router says that a session has moved."""
        body = cast("SessionMoved", unpack(entry))
        session = next(
            (each for each in sessions_of(self._core) if each.name == body.session), None
        )
        if session is None:
            return
        self._told[session].append(Told(body, self._epoch_of(body.to_worker)))
        owner = self._core.context.clients.named(session.client)
        if owner is not None and owner.peer != peer:
            self._broken(f"the move of {body.session} is told to another client")

    def check(self) -> None:
        """Compare; to be called now and then."""
        sessions = sessions_of(self._core)
        if not self._known and not sessions:
            self._claims.clear()
            return
        known = {session.name: self._place(session) for session in sessions}
        for name, place in known.items():
            before = self._known.get(name)
            if place == before and place.session not in self._told:
                continue  # it is where it was, and nobody was told anything else
            wrong = self._wrong(place, before)
            if wrong:
                self._broken(f"{name} {wrong}")
        self._known = known
        self._told.clear()
        self._claims.clear()

    def _place(self, session: SessionRecord) -> Place:
        epoch = self._epoch_of(session.worker)
        return Place(session, session.worker, epoch, session.has_lost_worker)

    def _epoch_of(self, name: str) -> str:
        worker = self._core.context.members.named(name)
        return worker.epoch if worker is not None else ""

    def _wrong(self, now: Place, before: Place | None) -> str:
        """What is wrong with what was said of a session; empty if nothing is."""
        session = now.session
        told = self._told.get(session, [])
        if before is not None and before.session is not session:
            before = None
        if before is None:
            told = _of_last_opening(told)
        moves = [each.move for each in told]
        start = self._claims.get(session.name, "") if before is None else before.worker
        if not moves:
            if start not in ("", now.worker):
                return f"has moved from {start} to {now.worker}, and nobody was told"
            has_new_lease = before is not None and before.epoch not in ("", now.epoch)
            if has_new_lease and not session.has_lost_worker:
                return f"has lost its past at {now.worker}, and nobody was told"
            return ""
        stops = [start or moves[0].from_worker, *(move.to_worker for move in moves)]
        if [move.from_worker for move in moves] != stops[:-1]:
            return f"was told to have moved {_path(moves)}, from {start}"
        if moves[-1].to_worker != now.worker:
            return f"was told to have moved {_path(moves)}, and is at {now.worker}"
        first_epoch = told[0].epoch
        if before is not None:
            first_epoch = "" if before.is_bereft else before.epoch
        epochs = [first_epoch, *(each.epoch for each in told)]
        for each, (earlier, later) in zip(moves, pairwise(epochs), strict=True):
            if each.from_worker == each.to_worker and earlier == later:  # nor has it forgotten
                return f"was told to have moved {_path(moves)}, which is no move"
        return ""


def _of_last_opening(told: list[Told]) -> list[Told]:
    """The last moves that hang together: one batch may open and close a session several times."""
    start = max(0, len(told) - 1)
    while start and told[start - 1].move.to_worker == told[start].move.from_worker:
        start -= 1
    return told[start:]


def _path(moves: list[SessionMoved]) -> str:
    return ", ".join(f"{move.from_worker} > {move.to_worker} ({move.reason})" for move in moves)
