"""A subscriber core, the worker that it hears, and what its reader was told."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.messages.generation import Deltas, FinishReason, Idle, Repaired
from rolloutbus.replay.choice import Choice, Filter
from rolloutbus.replay.stream.core import Answer, AskRepair, SubscriberCore, Unrepaired
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.stream.events import Finished, StreamEvent, Tokens

RID = "c/1"
FIRST: Attempt = (1, 1)
SECOND: Attempt = (1, 2)
NOT_HERE = Unrepaired("it does not run here", is_final=True)
BUSY = Unrepaired("busy", is_final=False)

EventT = TypeVar("EventT")


class Execution(NamedTuple):
    """Who samples a request, and what."""

    attempt: Attempt = FIRST
    worker: str = "w0"
    salt: int = 0
    """Added to each token."""


ON_W0 = Execution()


def tokens_of(start: int, stop: int, salt: int = 0) -> list[int]:
    """The tokens [start, stop) of every stream here."""
    return [salt + 10 * index for index in range(start, stop)]


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _floats(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}f", *[-value / 8 for value in values])


class StreamBench:
    """All times are this bench's own."""

    def __init__(
        self,
        settings: SubscriberSettings | None = None,
        wanted: Filter | None = None,
        rids: Sequence[str] = (),
    ) -> None:
        self.core = SubscriberCore(
            settings or SubscriberSettings(), Choice(wanted or Filter()), rids
        )
        self.now = 100.0
        self.asked: list[AskRepair] = []
        self.told: list[StreamEvent] = []
        self.n_unread = 0
        self.asked += self.core.tick(self.now)

    def row(
        self,
        start: int,
        stop: int,
        finish: FinishReason | None = None,
        *,
        rid: str = RID,
        by: Execution = ON_W0,
        version: int = 0,
    ) -> None:
        """A worker publishes tokens [start, stop) of a request."""
        tokens = tokens_of(start, stop, by.salt)
        body = Deltas(
            rids=[rid],
            attempts=[by.attempt],
            seqs=[start],
            counts=[stop - start],
            tokens=_ints(tokens),
            logprobs=_floats(tokens),
            versions=[version],
            finishes=[(0, finish)] if finish else [],
        )
        self.publish(Entry("deltas", route=by.worker, body=pack(body)), rid)

    def idle(
        self, n_tokens: dict[str, int], *, attempt: Attempt = FIRST, worker: str = "w0"
    ) -> None:
        """A worker's heartbeat: rid -> tokens so far, of client `c`."""
        body = Idle(list(n_tokens), [attempt] * len(n_tokens), list(n_tokens.values()))
        self.publish(Entry("idle", route=worker, body=pack(body)), RID)

    def publish(self, entry: Entry, rid: str) -> None:
        topic = topic_of(rid.rpartition("/")[0])
        self.asked += self.core.published(topic, [entry], self.n_unread, self.now)

    def answer(self, stop: int, *, salt: int = 0, start: int | None = None) -> AskRepair:
        """The worker has tokens up to `stop` and brings what was asked for first."""
        ask = self.asked[0]
        begin = ask.body.start if start is None else start
        tokens = tokens_of(begin, stop, salt)
        runs = [(0, stop - begin)] if stop > begin else []
        self.end(Repaired(begin, _ints(tokens), _floats(tokens), runs))
        return ask

    def end(self, answer: Answer) -> None:
        """The repair that was asked for first ends so."""
        self.asked += self.core.answered(self.asked.pop(0), answer, self.now)

    def advance(self, seconds: float) -> None:
        """Time passes, in steps."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.asked += self.core.tick(self.now)

    def read(self) -> list[StreamEvent]:
        """Take all that is told now."""
        taken: list[StreamEvent] = []
        while (event := self.core.events.take(self.n_unread)) is not None:
            taken.append(event)
        self.told += taken
        return taken

    def of(self, kind: type[EventT]) -> list[EventT]:
        """Everything of a kind that was told so far."""
        return [event for event in self.told if isinstance(event, kind)]

    def text(self, rid: str = RID) -> list[int]:
        """The tokens that a reader has put together, what was void left out."""
        held: list[int] = []
        for event in self.of(Tokens):
            if event.rid == rid:
                del held[event.start :]
                assert event.start == len(held), "a jump that nobody told of"
                held += event.tokens.tolist()
        return held

    def finished(self, rid: str = RID) -> Finished:
        (event,) = [event for event in self.of(Finished) if event.rid == rid]
        return event
