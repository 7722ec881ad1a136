"""A recording made by hand, with everything that a timeline shows; and what is to come of it.

`python -m tests.unit.replay.timeline_story` writes the golden files again: read the diff.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from rolloutbus.bus.streams.tap import TapEvent
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Attempt, Entry, Placement
from rolloutbus.bus.wire.messages.control import Pause, Resume
from rolloutbus.bus.wire.messages.endings import Accepted, Done, Problem
from rolloutbus.bus.wire.messages.endings import Lost as LostItems
from rolloutbus.bus.wire.messages.generation import (
    Deltas,
    FinishReason,
    Generate,
    Generated,
    Prefix,
    SamplingParams,
    SessionMoved,
)
from rolloutbus.bus.wire.messages.membership import (
    Heartbeat,
    Hello,
    Member,
    Members,
    Welcome,
    WorkerFacts,
)
from rolloutbus.bus.wire.messages.weights import (
    Committed,
    CommitUpdate,
    Prepared,
    PrepareUpdate,
    PublishVersion,
    VersionPublished,
)
from rolloutbus.replay.journal.records import End, Head, LostRecord, Record, Stream, Tap, ToldRecord
from rolloutbus.replay.timeline.browser import trace_of
from rolloutbus.replay.timeline.timeline import timeline_of

GOLDEN = Path(__file__).parent / "golden"
BOOT_NS = 5_000_000_000
WALL_NS = 1_700_000_000_000_000_000
MS = 1_000_000
Command = list[tuple[int, str, str, Entry]]
"""(milliseconds, `sent` or `received`, worker, entry)."""


def zeros(n: int) -> bytes:
    return np.zeros(n, np.int32).tobytes()


class Tape:
    """Records at the times that are said, in milliseconds since the first."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.segment = 0
        self.head(0)

    def head(self, at_ms: int) -> None:
        self.segment += 1
        wall_ns = WALL_NS + at_ms * MS
        self._add(Head, at_ms, "j", self.segment, 1, bytes(8), wall_ns, "host")

    def told(self, at_ms: int, kind: str, body: msgspec.Struct) -> None:
        self._add(ToldRecord, at_ms, [Entry(kind, body=pack(body))])

    def received(self, at_ms: int, name: str, entry: Entry) -> None:
        self._tap(at_ms, "received", name, entry)

    def sent(self, at_ms: int, name: str, entry: Entry) -> None:
        self._tap(at_ms, "sent", name, entry)

    def heartbeat(self, at_ms: int, worker: str, version: int = 0, state: str = "ready") -> None:
        self.received(at_ms, worker, Entry("beat", body=pack(Heartbeat(1, version, state))))

    def asked(self, at_ms: int, rid: str, *, stream: bool = True, n_prefix: int = 0) -> Entry:
        prefix = Prefix(zeros(n_prefix), zeros(n_prefix), [(1, n_prefix)]) if n_prefix else None
        body = Generate(zeros(3), SamplingParams(max_new_tokens=9), stream=stream, prefix=prefix)
        place = Placement("default", session="s", group="g")
        entry = Entry("generate", rid, place=place, body=pack(body))
        self.received(at_ms, "c", entry)
        return entry

    def given(self, at_ms: int, worker: str, entry: Entry, attempt: Attempt) -> None:
        self.sent(at_ms, worker, Entry("generate", entry.rid, attempt, body=entry.body))

    def accepted(self, at_ms: int, worker: str, rid: str, attempt: Attempt) -> None:
        self.received(at_ms, worker, Entry("accepted", body=pack(Accepted([(rid, attempt)]))))

    def row(
        self,
        at_ms: int,
        worker: str,
        key: tuple[str, Attempt],
        count: int = 1,
        *,
        version: int = 0,
        finish: FinishReason | None = None,
    ) -> None:
        finishes: list[tuple[int, FinishReason]] = [(0, finish)] if finish else []
        columns = zeros(count), zeros(count)
        body = Deltas([key[0]], [key[1]], [0], [count], *columns, [version], finishes)
        self._add(Stream, at_ms, bytes(16), [Entry("deltas", route=worker, body=pack(body))])

    def finished(
        self,
        at_ms: int,
        worker: str,
        key: tuple[str, Attempt],
        run_ms: float,
        n_resumed: int = 0,
    ) -> None:
        result = Generated(
            zeros(4), zeros(4), [(0, 4)], "length", 0, 3, n_resumed=n_resumed, run_ms=run_ms
        )
        entry = Entry("finished", *key, route="c", body=pack(result))
        self.received(at_ms, worker, entry)
        self.sent(at_ms, "c", Entry("finished", *key, route=worker, body=entry.body))

    def end(self, at_ms: int, reason: str = "closed") -> None:
        self._add(End, at_ms, reason, len(self.records))

    def lost(self, at_ms: int, source: str, count: int) -> None:
        self._add(LostRecord, at_ms, source, "c/1", (1, 1), 0, count)

    def _tap(self, at_ms: int, event: TapEvent, name: str, entry: Entry) -> None:
        self._add(Tap, at_ms, event, len(self.records), 0.0, 1, name, [entry])

    def _add(self, kind: type[Record], at_ms: int, *fields: object) -> None:
        record = kind(len(self.records), BOOT_NS + at_ms * MS, *fields)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.records.append(record)


def command(
    at_ms: int,
    until_ms: int,
    to: tuple[str, str],
    body: tuple[str, msgspec.Struct],
    result: tuple[str, msgspec.Struct],
) -> Command:
    """A command to a member, and its ending; to be put in their places."""
    worker, rid = to[0], f"{to[1]}@{to[0]}"
    asked = Entry(body[0], rid, (1, 90), body=pack(body[1]))
    answer = Entry(result[0], rid, (1, 90), body=pack(result[1]))
    return [(at_ms, "sent", worker, asked), (until_ms, "received", worker, answer)]


def play(tape: Tape, *of: Command) -> None:
    """Put commands and their endings in order."""
    for at_ms, event, worker, entry in sorted(chain(*of), key=lambda each: each[0]):
        (tape.sent if event == "sent" else tape.received)(at_ms, worker, entry)


def members(*found: tuple[str, str, int]) -> list[Member]:
    """(name, boot, version) of each."""
    return [
        Member(name, f"{boot}.1", "ipc://x", "ready", version, "default")
        for name, boot, version in found
    ]


def story() -> list[Record]:
    """Two workers: an update that one of them fails, a pause, a death, a resumed rollout."""
    tape = Tape()
    both = members(("w0", "a", 0), ("w1", "b", 0))
    tape.told(10, "welcome", Welcome(1, "r", 1, both))
    tape.heartbeat(50, "w0")
    tape.heartbeat(50, "w1")
    _two_rollouts_and_an_update(tape)
    _a_pause(tape)
    _a_death(tape)
    tape.lost(3200, "stream", 17)
    tape.end(3300)
    tape.head(4300)  # somebody recorded again
    tape.told(4310, "members", Members(members(("w0", "a2", 1), ("w1", "b", 1))))
    tape.heartbeat(4400, "w1", 1, "asleep")
    tape.end(4500)
    return tape.records


def _two_rollouts_and_an_update(tape: Tape) -> None:
    one = tape.asked(100, "c/1")
    tape.given(110, "w0", one, (1, 1))
    tape.accepted(115, "w0", "c/1", (1, 1))
    two = tape.asked(120, "c/2", stream=False)
    tape.given(150, "w1", two, (1, 2))
    tape.accepted(160, "w1", "c/2", (1, 2))
    tape.row(200, "w0", ("c/1", (1, 1)))
    tape.row(300, "w0", ("c/1", (1, 1)))
    publish = Entry("publish_version", "t/1", body=pack(PublishVersion("default", 1)))
    tape.received(350, "t", publish)
    prepare = ("prepare_update", PrepareUpdate("default", 1, "ipc://s"))
    commit = ("commit_update", CommitUpdate("default", 1, "keep"))
    prepared = ("finished", Prepared(1, 2 * 1024 * 1024, "shm", 30.0))
    play(
        tape,
        command(360, 400, ("w0", "t/1.p"), prepare, prepared),
        command(360, 420, ("w1", "t/1.p"), prepare, prepared),
    )
    play(
        tape,
        command(450, 500, ("w0", "t/1.c"), commit, ("finished", Committed(1, 12.5))),
        command(
            450,
            520,
            ("w1", "t/1.c"),
            commit,
            ("failed", Problem("engine_failed", "no", "failed")),
        ),
    )
    tape.sent(530, "t", Entry("finished", "t/1", body=pack(VersionPublished(1, []))))
    tape.row(600, "w0", ("c/1", (1, 1)), version=1)
    tape.row(700, "w0", ("c/1", (1, 1)), version=1, finish="length")
    tape.finished(710, "w0", ("c/1", (1, 1)), 500.0)
    # Nobody streams it: eight tokens of one version and four of the next come at once.
    tape.row(900, "w1", ("c/2", (1, 2)), 8)
    tape.row(900, "w1", ("c/2", (1, 2)), 4, version=1)
    tape.row(1000, "w1", ("c/2", (1, 2)), 1, version=1, finish="length")
    tape.finished(1000, "w1", ("c/2", (1, 2)), 740.0)
    tape.heartbeat(1010, "w0", 1)
    tape.heartbeat(1010, "w1", 1)


def _a_pause(tape: Tape) -> None:
    done = ("finished", Done())
    play(tape, command(1100, 1110, ("w1", "c/3"), ("pause", Pause()), done))
    tape.heartbeat(1200, "w1", 1, "paused")
    play(tape, command(1300, 1310, ("w1", "c/4"), ("resume", Resume()), done))


def _a_death(tape: Tape) -> None:
    five = tape.asked(1500, "c/5")
    tape.given(1500, "w0", five, (1, 3))
    tape.accepted(1505, "w0", "c/5", (1, 3))
    tape.row(1600, "w0", ("c/5", (1, 3)), version=1)
    # It was given to the dead worker and never accepted: the router gives it to another one.
    six = tape.asked(1650, "c/6")
    tape.given(1650, "w0", six, (1, 4))
    lost = LostItems([("c/5", (1, 3))], "w0", "lease expired")
    tape.sent(2500, "c", Entry("lost", body=pack(lost)))
    tape.told(2500, "members", Members(members(("w1", "b", 1))))
    tape.sent(2505, "c", Entry("session_moved", body=pack(SessionMoved("s", "w0", "w1", "lost"))))
    tape.given(2510, "w1", six, (1, 5))
    again = tape.asked(2520, "c/5", n_prefix=1)
    tape.given(2550, "w1", again, (1, 6))
    tape.accepted(2560, "w1", "c/5", (1, 6))
    tape.row(2600, "w1", ("c/5", (1, 6)), version=1)
    tape.row(2700, "w1", ("c/5", (1, 6)), version=1, finish="length")
    tape.finished(2710, "w1", ("c/5", (1, 6)), 100.0, n_resumed=1)
    facts = WorkerFacts("default", "ipc://x", 4, 100, 64, "fake", ["generate"])
    tape.received(2800, "w0", Entry("hello", body=pack(Hello("worker", "w0", "a2", worker=facts))))
    tape.heartbeat(2801, "w0")
    tape.heartbeat(2900, "w0", 1)


def golden_files(records: Sequence[Record]) -> dict[str, bytes]:
    """What timeline and trace are to be, as the files hold them."""
    found = timeline_of(records)
    return {
        "timeline.json": _pretty(msgspec.json.encode(found)),
        "timeline.trace.json": _pretty(trace_of(found)),
    }


def _pretty(content: bytes) -> bytes:
    return msgspec.json.format(content, indent=1) + b"\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, content in golden_files(story()).items():
        (GOLDEN / name).write_bytes(content)
