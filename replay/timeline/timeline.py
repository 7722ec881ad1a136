"""A timeline out of a journal: what each worker did when, by which weights, and what held it up.

Pure. Times are those at which the recorder heard of something, so that there is one clock.
"""

from collections.abc import Iterable, Mapping

from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import SessionMoved
from rolloutbus.bus.wire.messages.membership import Goodbye, Members, Welcome
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.replay.journal.records import End, Head, LostRecord, Record, Stream, Tap, ToldRecord
from rolloutbus.replay.timeline.lanes import FINE_S, LaneSpan, Sums, Timeline, WorkerLane, bins_of
from rolloutbus.replay.timeline.requests import RequestStories, executions_of, spans_in_order
from rolloutbus.replay.timeline.workers import WorkerBook, WorkerTrack

_LOST = {
    "tap": "messages of the router's tap",
    "stream": "tokens of streams",
    "memory": "messages for want of room",
}


def notes_of(
    lanes: Iterable[WorkerLane],
    *,
    has_tap: bool,
    chosen: str,
    lost: Mapping[str, int],
    n_malformed: int,
) -> list[str]:
    """Sentences. `chosen`: filter of the recording; `lost`: source -> how much was missed."""
    notes = ["Times are those at which the recorder heard of something."]
    if has_tap:
        notes.append(
            "Prefill is what lies between a worker's word that it has accepted a request and the "
            "first token; waiting for a place in the engine's batch is part of it."
        )
        notes.append(
            "A stall is as long as the worker measured; it is drawn to end where the worker's "
            "word of the commit was heard."
        )
    else:
        notes.append(
            "Recorded without the router's tap: queue, prefill, pauses, updates and losses are not "
            "in it, and states and versions of workers only as far as clients are told."
        )
    if chosen:
        notes.append(
            f"Recorded with the filter {chosen}: other requests, and heartbeats with states, "
            "are not in it."
        )
    executions = [each for lane in lanes for each in lane.executions]
    n_unsplit = sum(span.kind == "unsplit" for each in executions for span in each.spans)
    if n_unsplit:
        notes.append(f"Prefill and decode cannot be told apart in {n_unsplit} executions.")
    n_open = sum(each.outcome == "open" for each in executions)
    if n_open:
        notes.append(f"The end of {n_open} executions was not heard.")
    notes += [f"Not recorded: {n:,} {_LOST.get(source, source)}." for source, n in lost.items()]
    if n_malformed:
        notes.append(f"{n_malformed} entries could not be read.")
    return notes


NS = 1_000_000_000
ANOTHER_CLOCK_NS = NS
"""Wall time and the recorder's clock drift by less within one boot of a machine."""


def timeline_of(records: Iterable[Record]) -> Timeline:
    """Everything that a journal says, as lanes.

    Raises:
        JournalDamaged: as the journal that the records come from.
    """
    reader = TimelineReader()
    for record in records:
        reader.read(record)
    return reader.timeline()


class TimelineReader:
    """Reads records one by one."""

    def __init__(self) -> None:
        self._requests = RequestStories()
        self._workers = WorkerBook()
        self._publishing: dict[str, tuple[PublishVersion, float]] = {}
        self._updates: list[LaneSpan] = []
        self._moves: list[LaneSpan] = []
        self._unrecorded: list[LaneSpan] = []
        self._began_ns: int | None = None
        self._offset_ns = 0
        """Unix time less the recorder's clock."""
        self._now_s = 0.0
        self._is_interrupted = False
        self._filter = ""
        self._lost: dict[str, int] = {}
        self._n_malformed = 0
        self._has_tap = False

    def read(self, record: Record) -> None:
        """The next record of the journal."""
        if isinstance(record, Head):
            self._begin(record)
        if self._began_ns is not None:
            passed_s = (record.at_ns + self._offset_ns - self._began_ns) / NS
            self._now_s = max(self._now_s, passed_s)
        match record:
            case Tap():
                self._has_tap = True
                for entry in record.entries:
                    self._guarded(record, entry)
            case Stream() | ToldRecord():
                for entry in record.entries:
                    self._guarded(record, entry)
            case LostRecord():
                self._lost[record.source] = self._lost.get(record.source, 0) + record.count
            case End():
                self._is_interrupted = record.reason != "rotated"
            case _:
                pass

    def timeline(self) -> Timeline:
        """What was read so far. Ends the reading."""
        end_s = self._now_s
        self._workers.close(end_s)
        for body, at_s in self._publishing.values():
            self._updates.append(_publish(body, at_s, end_s, "no end heard"))
        n_bins, width = bins_of(end_s)
        by_worker = executions_of(self._requests, end_s)
        for name in by_worker:
            self._workers.workers.setdefault(name, WorkerTrack(name))
        lanes = [
            WorkerLane(
                worker.name,
                worker.policy,
                worker.engine,
                worker.slots,
                1 + max((each.row for each in by_worker.get(worker.name, [])), default=-1),
                worker.versions.spans,
                spans_in_order(worker.states.spans),
                spans_in_order(worker.weights),
                by_worker.get(worker.name, []),
                self._requests.tokens.get(worker.name, Sums()).rates(n_bins, width),
            )
            for worker in sorted(
                self._workers.workers.values(), key=lambda each: (len(each.name), each.name)
            )
        ]
        return Timeline(
            (self._began_ns or 0) / NS,
            end_s,
            width * FINE_S,
            lanes,
            spans_in_order(self._updates),
            self._requests.waiting.highest(n_bins, width),
            self._unrecorded,
            notes_of(
                lanes,
                has_tap=self._has_tap,
                chosen=self._filter,
                lost=self._lost,
                n_malformed=self._n_malformed,
            ),
            self._moves,
        )

    def _begin(self, head: Head) -> None:
        """Of a segment, maybe by another process, maybe after a restart of the machine."""
        offset_ns = head.wall_ns - head.at_ns
        if abs(offset_ns - self._offset_ns) > ANOTHER_CLOCK_NS:
            self._offset_ns = offset_ns
        self._filter = self._filter or head.filter
        if self._began_ns is None:
            self._began_ns = head.at_ns + self._offset_ns
        elif self._is_interrupted:
            again_s = max(self._now_s, (head.at_ns + self._offset_ns - self._began_ns) / NS)
            self._unrecorded.append(LaneSpan("unrecorded", self._now_s, again_s))
            self._requests.interrupt(self._now_s)
            self._workers.interrupt(self._now_s, again_s)
            self._publishing.clear()
        self._is_interrupted = False

    def _guarded(self, record: Tap | Stream | ToldRecord, entry: Entry) -> None:
        """What a peer made up must not end the reading."""
        try:
            if isinstance(record, Tap):
                self._tapped(record, entry)
            elif isinstance(record, ToldRecord):
                self._membership(entry)
            else:
                self._workers.heard(entry.route, self._now_s)
                if entry.kind == "deltas":
                    self._requests.published(entry, self._now_s)
        except (RemoteProtocolError, IndexError):
            self._n_malformed += 1

    def _tapped(self, tap: Tap, entry: Entry) -> None:
        if tap.event == "received":
            self._received(tap.name, entry)
        elif tap.event == "sent":
            self._sent(tap.name, entry)

    def _received(self, name: str, entry: Entry) -> None:
        now_s, requests, workers = self._now_s, self._requests, self._workers
        if entry.kind != "hello":  # a new process must not speak for the one before
            workers.heard(name, now_s)
        match entry.kind:
            case "generate":
                requests.asked(entry, now_s)
            case "accepted":
                requests.accepted(name, entry, now_s)
            case "hello":
                workers.hello(entry, now_s)
            case "beat":
                workers.heartbeat(name, entry, now_s)
            case "goodbye":
                reason = unpack_as(Goodbye, entry).reason
                workers.goodbye(name, reason, now_s)
            case "publish_version":
                body = unpack_as(PublishVersion, entry)
                self._publishing.setdefault(entry.rid, (body, now_s))
            case kind if kind in ENDINGS:
                if "@" in entry.rid:
                    workers.ended(name, entry, now_s)
                elif name in workers.workers:
                    requests.ended(entry, now_s)
            case _:
                pass

    def _sent(self, name: str, entry: Entry) -> None:
        now_s, requests = self._now_s, self._requests
        match entry.kind:
            case "generate":
                requests.given(name, entry, now_s)
            case "lost" | "fenced":
                requests.taken_away(entry, now_s)
            case "welcome" | "members":
                self._membership(entry)
            case "session_moved":
                self._moves.append(_moved(unpack_as(SessionMoved, entry), now_s))
            case kind if kind in ENDINGS:
                body, began_s = self._publishing.pop(entry.rid, (None, 0.0))
                if body is not None:
                    self._updates.append(_publish(body, began_s, now_s, kind))
                elif entry.attempt == NO_ATTEMPT:
                    requests.ended(entry, now_s)  # the router's own word
            case _:
                self._workers.sent(name, entry, now_s)

    def _membership(self, entry: Entry) -> None:
        if entry.kind == "welcome":
            found = unpack_as(Welcome, entry).members
            if not found:  # that of a member tells nothing
                return
        elif entry.kind == "members":
            found = unpack_as(Members, entry).members
        else:
            return
        self._workers.members(found, self._now_s, tells_all=not self._has_tap)


def _moved(body: SessionMoved, at_s: float) -> LaneSpan:
    note = f"{body.session}: {body.from_worker} -> {body.to_worker} ({body.reason})"
    return LaneSpan("moved", at_s, at_s, note=note)


def _publish(body: PublishVersion, start_s: float, end_s: float, outcome: str) -> LaneSpan:
    note = f"{body.policy} v{body.version} ({body.mode}, {body.in_flight}): {outcome}"
    return LaneSpan("publish", start_s, end_s, body.version, note=note)
