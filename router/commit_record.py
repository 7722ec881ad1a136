"""The store's part in an update: it writes down what was decided, as soon as it can.

Spec: docs/protocol.md, "Weights", 2 and 3.
"""

from collections.abc import Callable
from typing import NamedTuple

from bus.codec import pack
from bus.messages.weights import RecordCommit
from router.context import Context
from router.fleet import Fleet, MemberCommand, Results

OnWritten = Callable[[bool, float], None]
"""(it is written: not so if the store refuses, or is not there before the deadline; now)."""


class Decision(NamedTuple):
    """What is to be written, for one step of one update."""

    rid: str
    """Of the member command; names the step."""
    body: RecordCommit
    deadline_at: float
    on_asked: Callable[[], None]
    """The store may have written it from now on; maybe more than once."""
    on_written: OnWritten


class CommitRecord:
    """Decisions under way to the store; those that it could not take yet are kept."""

    def __init__(self, context: Context, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet
        self._waiting: dict[str, Decision] = {}
        """By rid."""

    def write(self, decision: Decision, now: float) -> None:
        """Have it written, now or as soon as there is a store."""

        def done(results: Results, silent: list[str], at: float) -> None:
            if silent and at < decision.deadline_at:
                self._waiting[decision.rid] = decision  # the store will be back
                return
            is_written = all(each.kind == "finished" for each in results.values())
            decision.on_written(is_written and not silent, at)

        store = self._context.members.store()
        if store is None:
            done({}, ["store"], now)
            return
        decision.on_asked()
        packed = pack(decision.body)
        command = MemberCommand(decision.rid, "record_commit", packed, decision.deadline_at, done)
        self._fleet.start(command, [store], now)

    def forget(self, rid: str) -> None:
        """It need not be written any more; idempotent."""
        self._waiting.pop(rid, None)

    def tick(self, now: float) -> None:
        """Try again what the store could not take."""
        waiting, self._waiting = self._waiting, {}
        for decision in waiting.values():
            self.write(decision, now)
