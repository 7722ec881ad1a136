"""Acknowledgements of endings, gathered per worker until the end of the tick."""

from bus.codec import pack
from bus.effects import THE_LINK, Send
from bus.entry import Entry
from bus.ids import Attempt
from bus.messages.delivery import Ack, AttemptList
from trainer_adapter.effects import Effect

MAX_PER_ENTRY = 1000


class Acks:
    """Whatever ended, from whichever attempt: its worker may forget it."""

    def __init__(self, out: list[Effect]) -> None:
        self._out = out
        self._waiting: dict[str, AttemptList] = {}

    def add(self, worker: str, rid: str, attempt: Attempt) -> None:
        """This ending has arrived."""
        self._waiting.setdefault(worker, []).append((rid, attempt))

    def flush(self) -> None:
        """One entry per worker."""
        waiting, self._waiting = self._waiting, {}
        for worker, items in waiting.items():
            for start in range(0, len(items), MAX_PER_ENTRY):
                body = pack(Ack(items[start : start + MAX_PER_ENTRY]))
                self._out.append(Send(THE_LINK, Entry("ack", route=f"worker:{worker}", body=body)))

    def drop(self) -> None:
        """The link is down: workers send again what was not acknowledged."""
        self._waiting.clear()
