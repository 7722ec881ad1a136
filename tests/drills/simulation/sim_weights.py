"""The weights of a simulated engine: what it serves with, what it pulls, what is staged."""

from collections.abc import Callable

import msgspec

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    Prepared,
    PrepareUpdate,
)
from tests.drills.simulation.watch import UpdatePhase

PARTS = 3
"""A transfer takes so many steps of the engine, and needs the store for each."""
PATIENCE_S = 5.0
"""A transfer that gets no part for so long has failed."""

Answer = tuple[str, msgspec.Struct]
"""Kind and body of an ending."""
WAYS = ["collective", "cuda_ipc", "delta", "disk", "shm", "tcp"]
"""It can take weights by all of them."""
Later = Callable[[Callable[[], None]], None]
"""Does something after the next step of the engine, unless it has died."""


class SimWeights:
    """As an engine host with a receiver keeps them; a pull is its only slow part."""

    def __init__(
        self,
        later: Later,
        step_s: float,
        can_pull: Callable[[], bool],
        reached: Callable[[UpdatePhase], None],
    ) -> None:
        self.version = 0
        self._later, self._step_s = later, step_s
        self._can_pull, self._reached = can_pull, reached
        self._pulling = self._staged = 0

    def prepare(self, body: PrepareUpdate, say: Callable[[Answer], None]) -> None:
        """Pull a version, part by part; by `tcp` if the way asked for is closed at first."""
        version = body.version
        if version <= self.version or version == self._staged:
            say(("finished", Prepared(version, 0, "", 0.0)))
            return
        is_closed = body.transport != "tcp" and not self._can_pull()
        way = "tcp" if is_closed else body.transport
        why = f"{body.transport}: the way is closed" if is_closed else ""
        self._pulling = version
        self._reached("transfer")
        self._pull(Prepared(version, 64, way, 1.0, why=why), PARTS, PATIENCE_S, say)

    def commit(self, body: CommitUpdate) -> Answer:
        """Serve with what is staged."""
        if body.version <= self.version:
            return "finished", Committed(body.version, 0.0)
        if body.version != self._staged:
            return "failed", Problem("update_failed", "It is not staged here.", "not_started")
        self.version, self._staged = body.version, 0
        return "finished", Committed(body.version, self._step_s * 1000)

    def abort(self, body: AbortUpdate) -> None:
        """Drop what was pulled of it."""
        self._pulling = 0 if self._pulling == body.version else self._pulling
        self._staged = 0 if self._staged == body.version else self._staged

    def _pull(
        self, found: Prepared, n_parts: int, patience_s: float, say: Callable[[Answer], None]
    ) -> None:
        if self._pulling != found.version or patience_s <= 0:
            say(("failed", Problem("update_failed", "The transfer was given up.", "failed")))
        elif not n_parts:
            self._pulling, self._staged = 0, found.version
            self._reached("staged")
            say(("finished", found))
        elif self._can_pull():
            self._later(lambda: self._pull(found, n_parts - 1, PATIENCE_S, say))
        else:
            left_s = patience_s - self._step_s
            self._later(lambda: self._pull(found, n_parts, left_s, say))
