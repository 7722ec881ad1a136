"""Detached requests that this process has the end of: whoever may not have heard is told again.

An acknowledgement is sent once, and may be lost with its connection, its router or its worker's.
Of other requests the ending comes again then; of a detached one it would wait for a process that
asks for it, and be handed out twice. Spec: docs/protocol.md, "Detached requests".
"""

from collections.abc import Iterator

from bus.errors import DeadlineExceeded, RequestExpired
from bus.messages.generation import Attach, DetachedList, ListDetached
from trainer_adapter.effects import Outcome
from trainer_adapter.request_book import INTERNAL_DEADLINE_S, RequestBook, Then
from trainer_adapter.requests import Ask

MAX_REMEMBERED = 1000
"""The latest ones: an acknowledgement is lost within seconds or not at all."""
QUESTION = Ask("list_detached", ListDetached())


class Collected:
    """The latest of them; what the router still keeps of these is taken and acknowledged."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._rids: dict[str, None] = {}
        self._is_asking = False

    def add(self, rid: str) -> None:
        """It has ended for its caller."""
        self._rids.pop(rid, None)
        self._rids[rid] = None
        if len(self._rids) > MAX_REMEMBERED:
            del self._rids[next(iter(self._rids))]

    def checking(self) -> Iterator[tuple[Ask, Then]]:
        """What to ask of a router that may not know of every end."""
        if self._rids and not self._is_asking:
            self._is_asking = True
            yield QUESTION, self._listed

    def _listed(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, DeadlineExceeded | RequestExpired):
            # A router does not answer while it recovers.
            self._book.add(QUESTION, INTERNAL_DEADLINE_S, now, self._listed)
            return
        self._is_asking = False
        if not isinstance(outcome, DetachedList):
            return
        for each in outcome.requests:
            is_over = each.rid in self._rids and each.rid not in self._book.open
            if is_over and each.state == "ended":
                taken_up = Ask("attach", Attach(), on_loss="fail", rid=each.rid)
                self._book.add(taken_up, INTERNAL_DEADLINE_S, now, _nothing)


def _nothing(outcome: Outcome, now: float) -> None:
    """Its caller has it already."""
    del outcome, now
