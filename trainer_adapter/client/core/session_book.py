"""The sessions that a client has opened: where each is, and how all come back on a fresh link.

Spec: docs/protocol.md, "Sessions".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)
from rolloutbus.trainer_adapter.client.core.effects import ClientCounters, Outcome
from rolloutbus.trainer_adapter.client.core.request_book import Then
from rolloutbus.trainer_adapter.client.core.requests import Ask

UNSEEN = "unseen"
"""Reason of a move that the router told while this client was away."""


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A session that is open, as its client knows."""

    asked: OpenSession
    """How it was opened last."""
    worker: str
    """Name of the worker that caches the prefix."""
    n_moved: int = 0
    last_move: SessionMoved | None = None


class SessionBook:
    """Sessions by name."""

    def __init__(self, counters: ClientCounters) -> None:
        self._counters = counters
        self.held: dict[str, HeldSession] = {}

    def ended(self, body: msgspec.Struct, outcome: Outcome) -> None:
        """A command of the caller ended, if only by its deadline; most are not about sessions.

        A session that its caller closed is left to its lease, where the router does not answer.
        """
        if isinstance(body, OpenSession) and isinstance(outcome, OpenedSession):
            before = self.held.get(body.session)
            if before is None:
                self.held[body.session] = HeldSession(body, outcome.worker)
            else:
                self.held[body.session] = replace(before, asked=body)
                self._settle(body.session, outcome.worker)
        elif isinstance(body, CloseSession):
            self.held.pop(body.session, None)

    def moved(self, body: SessionMoved) -> None:
        """The router moved a session."""
        self._counters.sessions_moved += 1
        before = self.held.get(body.session)
        if before is not None:
            self.held[body.session] = replace(
                before, worker=body.to_worker, n_moved=before.n_moved + 1, last_move=body
            )

    def reopening(self) -> Iterator[tuple[Ask, Then]]:
        """What to ask of a router that may know none of them, before anything else."""
        for name, session in self.held.items():

            def then(outcome: Outcome, _now: float, name: str = name) -> None:
                self._reopened(name, outcome)

            body = msgspec.structs.replace(session.asked, worker=session.worker)
            yield Ask("open_session", body), then

    def _reopened(self, name: str, outcome: Outcome) -> None:
        if isinstance(outcome, OpenedSession):
            self._settle(name, outcome.worker)
        elif isinstance(outcome, Refused) and self.held.pop(name, None) is not None:
            self._counters.sessions_lost += 1

    def _settle(self, name: str, worker: str) -> None:
        before = self.held.get(name)
        if before is not None and before.worker != worker:
            self.moved(SessionMoved(name, before.worker, worker, UNSEEN))
