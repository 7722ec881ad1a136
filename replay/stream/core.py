"""A subscriber's decisions: rows into streams, gaps repaired, streams without an end ended.

Pure: it gets what was published and the time, returns the repairs to ask for, and is asked for the
next event. Spec: docs/protocol.md, "Streams".
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolloutbus.bus.backoff import wait_after
from rolloutbus.bus.membership.tombstones import Tombstones
from rolloutbus.bus.streams.reassembly import Span, row_of_repaired, rows_of
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Deltas, Idle, Repair, Repaired
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.replay.choice import Choice
from rolloutbus.replay.stream.event_queue import EventQueue, SubscriberSettings
from rolloutbus.replay.stream.events import (
    GapFound,
    GapRepaired,
    Interrupted,
    WorkerJoined,
    WorkerLeft,
)
from rolloutbus.replay.stream.followed_stream import FollowedStream

MAX_TRIES = 3
"""Of repairs that brought nothing although they might have."""
TRY_AGAIN_S = 0.5
"""Before the second try; then it doubles."""
TRY_AGAIN_MAX_S = 2.0


class AskRepair(NamedTuple):
    """Request to repair a stream; give the worker's answer to `SubscriberCore.answered`."""

    worker: str
    body: Repair


class Unrepaired(NamedTuple):
    """Why a repair brought nothing."""

    why: str
    is_final: bool
    """Whether another try would be in vain."""


Answer = Repaired | Unrepaired


class Repairs:
    """Streams with a gap: repairs under way, and repairs that wait."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: dict[FollowedStream, float] = {}
        """Stream -> time before which its repair must not start."""
        self._under_way: dict[tuple[str, Attempt], FollowedStream] = {}

    def __contains__(self, stream: FollowedStream) -> bool:
        return stream in self._waiting or (stream.rid, stream.attempt) in self._under_way

    def want(self, stream: FollowedStream, not_before: float = 0.0) -> None:
        """Ask for what this stream lacks, when it is its turn."""
        if stream not in self:
            self._waiting[stream] = not_before

    def drop(self, stream: FollowedStream) -> None:
        """It needs nothing any more."""
        self._waiting.pop(stream, None)
        self._under_way.pop((stream.rid, stream.attempt), None)

    def next(self, now: float) -> list[AskRepair]:
        """Returns the repairs to request now."""
        asked: list[AskRepair] = []
        n_free = self._at_once - len(self._under_way)
        if n_free <= 0 or not self._waiting:
            return asked
        due = [stream for stream, not_before in self._waiting.items() if not_before <= now]
        for stream in due[:n_free]:
            del self._waiting[stream]
            key = (stream.rid, stream.attempt)
            self._under_way[key] = stream
            gap = stream.assembly.gap
            start = stream.assembly.next if gap is None else gap.start
            asked.append(AskRepair(stream.worker, Repair(*key, start)))
        return asked

    def answered(self, ask: AskRepair) -> FollowedStream | None:
        """Ends this repair; returns its stream, or None if the stream needs it no more."""
        stream = self._under_way.pop((ask.body.rid, ask.body.attempt), None)
        if stream is None or stream.attempt != ask.body.attempt:
            return None
        return stream


SILENT_S = 3.0
"""A stream that is not named for so long may have ended: it has five heartbeats a second."""
GONE_S = 10.0
"""A stream that is silent for so long has ended: a client would have resumed it elsewhere."""
LOOK_S = 1.0
LATE_TICK_S = 1.0
"""A tick later than this means that we were frozen: what waits is read before silence is judged."""
OVER_S = 600.0
"""How long an ended stream is remembered after the reader got its end."""
UNDECIDED_S = 1.0
"""The tap may report that a request is wanted only after its stream has ended."""
GONE = "no worker speaks of it any more"


@dataclass(slots=True)
class SubscriberCounters:
    """Since the start."""

    gaps: int = 0
    repairs: int = 0
    tokens_lost: int = 0
    malformed: int = 0


class SubscriberCore:
    """All streams that one subscriber follows."""

    def __init__(
        self, settings: SubscriberSettings, choice: Choice, rids: Collection[str] = ()
    ) -> None:
        """`rids`: follow these only; empty: all that are published and chosen."""
        self._settings = settings
        self._choice = choice
        self._rids = frozenset(rids)
        self._open: dict[str, FollowedStream] = {}
        self._at: dict[tuple[str, bytes], dict[str, FollowedStream]] = {}
        """(worker, topic) -> the open streams there, by rid."""
        self._over = Tombstones(OVER_S)
        self._undecided: dict[str, tuple[FollowedStream, float]] = {}
        """Streams that ended before it was known whether they are wanted."""
        self._repairs = Repairs(settings.repairs_at_once)
        self._members: dict[str, Member] = {}
        self._look_at = self._ticked_at = self._awake_at = 0.0
        self.events = EventQueue(settings)
        self.counters = SubscriberCounters()

    @property
    def n_open(self) -> int:
        """Streams that have not ended, as far as was heard."""
        return len(self._open)

    def members(self, members: Sequence[Member], now: float) -> list[AskRepair]:
        """The router's list of live workers."""
        present = {each.name: each for each in members}
        for name, known in list(self._members.items()):
            if name not in present or present[name].epoch != known.epoch:
                self.events.say(WorkerLeft(name, known.epoch))
                del self._members[name]
        for name, each in present.items():
            if name not in self._members:
                self.events.say(WorkerJoined(name, each.epoch, each.policy))
            self._members[name] = each
        return self._repairs.next(now)

    def tapped(self, entries: Sequence[Entry], now: float) -> list[AskRepair]:
        """What crosses the router tells which requests are wanted."""
        for entry in self._choice.routed(entries):
            if entry.place is None or not self._choice.wants(entry.rid):
                continue
            ended, _ = self._undecided.pop(entry.rid, (None, 0.0))
            stream = ended or self._open.get(entry.rid)
            if stream is not None and stream.is_hidden:
                stream.is_hidden = False
                self._judge(stream)
        return self._repairs.next(now)

    def published(
        self, topic: bytes, entries: Iterable[Entry], n_unread: int, now: float
    ) -> list[AskRepair]:
        """A message of a worker. `n_unread`: messages that the socket has given without a pause."""
        if n_unread >= self._settings.unread_messages:
            self.events.demote("socket")
        for entry in entries:
            try:
                if entry.kind == "deltas":
                    self._deltas(topic, entry, now)
                elif entry.kind == "idle":
                    self._idle(topic, entry, now)
            except RemoteProtocolError:
                self.counters.malformed += 1
        return self._repairs.next(now)

    def interrupted(self, n_connections: int, now: float) -> list[AskRepair]:
        """So many connections to publishers broke."""
        self.events.say(Interrupted(n_connections))
        return self._repairs.next(now)

    def answered(self, ask: AskRepair, answer: Answer, now: float) -> list[AskRepair]:
        """How a repair has ended."""
        stream = self._repairs.answered(ask)
        if stream is not None:
            before = stream.assembly.gap
            row = row_of_repaired(answer) if isinstance(answer, Repaired) else None
            why = "the answer breaks the protocol" if isinstance(answer, Repaired) else answer.why
            is_final = not isinstance(answer, Repaired) and answer.is_final
            if row is not None:
                self.counters.repairs += 1
                stream.repaired(row)
            gap = stream.assembly.gap
            if row is None or (before is not None and gap == before):
                stream.n_tries = MAX_TRIES if is_final else stream.n_tries + 1
            if gap is not None and stream.n_tries >= MAX_TRIES:
                self._lose(stream, why)
            elif gap is not None or (row is None and stream.n_tries < MAX_TRIES):
                wait_s = wait_after(stream.n_tries, TRY_AGAIN_S, TRY_AGAIN_MAX_S)
                self._repairs.want(stream, now + wait_s)
            self._judge(stream)
        return self._repairs.next(now)

    def tick(self, now: float) -> list[AskRepair]:
        """Time passes; call it a few times per second."""
        if now - self._ticked_at > LATE_TICK_S:
            self._awake_at = now
        self._ticked_at = now
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._over.expire(now)
            for stream in list(self._open.values()):
                self._look(stream, now)
            for rid, (stream, ended_at) in list(self._undecided.items()):
                if now - ended_at >= UNDECIDED_S:
                    del self._undecided[rid]
                    self.events.forget(stream)
        return self._repairs.next(now)

    def _deltas(self, topic: bytes, entry: Entry, now: float) -> None:
        deltas = unpack_as(Deltas, entry)
        finishes = dict(deltas.finishes)
        for index, (rid, attempt, row) in enumerate(rows_of(deltas)):
            stream = self._stream((rid, attempt), (entry.route, topic), row.start, now)
            if stream is not None:
                stream.assembly.add(row)
                if index in finishes:
                    stream.finish_reason, stream.is_over = finishes[index], True
                self._judge(stream)

    def _idle(self, topic: bytes, entry: Entry, now: float) -> None:
        idle = unpack_as(Idle, entry)
        place = entry.route, topic
        for rid, attempt, n_tokens in zip(idle.rids, idle.attempts, idle.n_tokens, strict=False):
            stream = self._stream((rid, attempt), place, n_tokens, now)
            if stream is not None:
                stream.assembly.heard(n_tokens)
                self._judge(stream)
        listed = set(idle.rids)
        for rid, stream in list(self._at.get(place, {}).items()):
            if rid not in listed and not stream.is_over:
                if not stream.is_hidden:  # the worker may still have the tokens of its end
                    self._repairs.want(stream)
                stream.is_over = True
                self._judge(stream)

    def _stream(
        self, key: tuple[str, Attempt], place: tuple[str, bytes], start: int, now: float
    ) -> FollowedStream | None:
        """Returns the stream of a row; None if the row does not count. `start`: its first token."""
        rid, attempt = key
        stream = self._open.get(rid)
        if stream is None:
            over = self._over.get(rid)
            is_wanted = not self._rids or rid in self._rids
            if not is_wanted or (over is not None and attempt <= over):
                return None
            stream = self._open[rid] = FollowedStream(rid, attempt, *place)
            stream.is_hidden = not self._choice.wants(rid)
            self._at.setdefault(place, {})[rid] = stream
        elif attempt < stream.attempt:
            return None
        elif attempt > stream.attempt:
            self._repairs.drop(stream)
            self._leave(stream)
            stream.begin(attempt, place[0], start)
            stream.topic = place[1]
            self._at.setdefault(place, {})[rid] = stream
        stream.heard_at = now
        stream.is_asked_for = False
        return stream

    def _judge(self, stream: FollowedStream) -> None:
        """Something of it has changed: is anything missing, is it complete?"""
        gap = stream.assembly.gap
        if not stream.is_hidden and (gap is not None or stream.found is not None):
            self._judge_gap(stream, gap)
        if stream.is_over and gap is None and not (stream.is_ended or stream in self._repairs):
            self._end(stream)
        self.events.changed(stream)
        while (dropped := self.events.oldest_to_let_go()) is not None:
            if not dropped.is_ended:
                self._end(dropped)
            self._over.put(dropped.rid, dropped.attempt, self._ticked_at)

    def _judge_gap(self, stream: FollowedStream, gap: Span | None) -> None:
        found = stream.found
        where = stream.rid, stream.attempt, stream.worker
        if found is not None and (gap is None or gap[0] >= found[1]):
            stream.found = None
            stream.n_tries = 0
            if self.events.is_live:
                self.events.say(GapRepaired(*where, *found))
        if gap is not None and not stream.is_ended:
            if stream.found is None:
                stream.found = gap
                self.counters.gaps += 1
                if self.events.is_live:
                    self.events.say(GapFound(*where, *gap))
            self._repairs.want(stream)

    def _look(self, stream: FollowedStream, now: float) -> None:
        """Asks a silent stream's worker for it; ends a stream that was silent for too long."""
        silent_s = now - max(stream.heard_at, self._awake_at)
        if silent_s >= GONE_S:
            self._repairs.drop(stream)
            while stream.assembly.gap is not None:
                self._lose(stream, GONE)
            stream.is_over = True
            self._judge(stream)
        elif silent_s >= SILENT_S and not (stream.is_asked_for or stream.is_hidden):
            stream.is_asked_for = True
            self._repairs.want(stream)

    def _lose(self, stream: FollowedStream, why: str) -> None:
        self.counters.tokens_lost += stream.lose(why)
        stream.found = None
        stream.n_tries = 0

    def _end(self, stream: FollowedStream) -> None:
        stream.is_ended = True
        del self._open[stream.rid]
        self._leave(stream)
        self._repairs.drop(stream)
        if stream.finish_reason is not None:
            self._over.put(stream.rid, stream.attempt, self._ticked_at)
        if stream.is_hidden:
            self._undecided[stream.rid] = stream, self._ticked_at

    def _leave(self, stream: FollowedStream) -> None:
        place = stream.worker, stream.topic
        there = self._at.get(place)
        if there is not None:
            there.pop(stream.rid, None)
            if not there:
                del self._at[place]
