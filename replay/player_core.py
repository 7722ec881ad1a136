"""What a player publishes for each record of a journal, where, and when.

Pure. Spec: docs/journal.md, "Playing".
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, cast

import msgspec

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES
from rolloutbus.bus.streams.tap import TapMark
from rolloutbus.bus.wire.codec import pack, unpack, unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, Idle
from rolloutbus.bus.wire.messages.membership import Member, Members, Welcome
from rolloutbus.replay.journal.records import End, Record, Stream, Tap, ToldRecord, Unknown
from rolloutbus.replay.recorder_core import is_generate_to_worker
from rolloutbus.replay.stand_in import Effect, Played, StandIn


def cut(entries: Iterable[Entry], rids: AbstractSet[str]) -> list[Entry]:
    """The entries without the rows of other requests; those with none left are left out."""
    found: list[Entry] = []
    for entry in entries:
        try:
            kept = _cut(entry, rids)
        except RemoteProtocolError:
            continue
        if kept is not None:
            found.append(kept)
    return found


def _cut(entry: Entry, rids: AbstractSet[str]) -> Entry | None:
    if entry.kind not in ("deltas", "idle"):
        return None
    body = cast("Deltas | Idle", unpack(entry))
    columns = (body.attempts, *((body.n_tokens,) if isinstance(body, Idle) else _columns(body)))
    if any(len(column) != len(body.rids) for column in columns):
        raise RemoteProtocolError(f"{entry.kind}: columns of unequal length")
    kept = [row for row, rid in enumerate(body.rids) if rid in rids]
    if not kept:
        return None
    if len(kept) == len(body.rids):
        return entry
    cut_body = _rows_of(body, kept) if isinstance(body, Deltas) else _streams_of(body, kept)
    return msgspec.structs.replace(entry, body=pack(cut_body))


def _columns(deltas: Deltas) -> tuple[list[int], ...]:
    return deltas.seqs, deltas.counts, deltas.versions


def _rows_of(deltas: Deltas, kept: list[int]) -> Deltas:
    ends = [0]
    for count in deltas.counts:
        ends.append(ends[-1] + TOKEN_BYTES * count)
    parts = [slice(ends[row], ends[row + 1]) for row in kept]
    finishes = dict(deltas.finishes)
    return Deltas(
        rids=[deltas.rids[row] for row in kept],
        attempts=[deltas.attempts[row] for row in kept],
        seqs=[deltas.seqs[row] for row in kept],
        counts=[deltas.counts[row] for row in kept],
        tokens=b"".join(deltas.tokens[part] for part in parts),
        logprobs=b"".join(deltas.logprobs[part] for part in parts),
        versions=[deltas.versions[row] for row in kept],
        finishes=[(new, finishes[row]) for new, row in enumerate(kept) if row in finishes],
        behaviour_logprobs=b"".join(deltas.behaviour_logprobs[part] for part in parts),
    )


def _streams_of(idle: Idle, kept: list[int]) -> Idle:
    return Idle(
        [idle.rids[row] for row in kept],
        [idle.attempts[row] for row in kept],
        [idle.n_tokens[row] for row in kept],
    )


_S = 1e-9


class Pace:
    """Follows the recorder's clock through a journal."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._elapsed_ns = 0

    def at_s(self, record: Record | Unknown) -> float:
        """Seconds from the beginning of the recording to this record, the next one."""
        if self._last_ns is not None:
            # A clock that begins again is that of a machine that was started again.
            self._elapsed_ns += max(0, record.at_ns - self._last_ns)
        self._last_ns = record.at_ns
        if isinstance(record, End) and record.reason != "rotated":
            self._last_ns = None  # no recorder ran from here until the next head
        return self._elapsed_ns * _S


UNKNOWN_POLICY = "default"


class JournalSurvey:
    """Summary of a journal, made before playing: a listener must know all publishers at once."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._told: dict[str, Member] = {}
        self._heard: dict[str, Member] = {}
        self.n_messages = 0
        """Of streams."""
        self.n_tapped = 0
        """Of the router's tap."""
        self.length_s = 0.0
        """From the first record to the last, while a recorder ran."""

    @property
    def workers(self) -> dict[str, Member]:
        """Workers that published anything, as first reported; `stream` is the recorded address."""
        return {name: self._told.get(name, heard) for name, heard in self._heard.items()}

    def add(self, record: Record) -> None:
        """The next record."""
        self.length_s = self._pace.at_s(record)
        if isinstance(record, Stream):
            self.n_messages += 1
            name = publisher_of(record)
            if name not in self._heard and record.entries:
                epoch = record.entries[0].epoch
                self._heard[name] = Member(name, epoch, "", "ready", 0, UNKNOWN_POLICY)
        elif isinstance(record, Tap):
            self.n_tapped += 1
        elif isinstance(record, ToldRecord):
            for member in members_in(record.entries) or ():
                self._told.setdefault(member.name, member)


def publisher_of(record: Stream) -> str:
    """The worker that published a message."""
    return record.entries[0].route if record.entries else ""


def members_in(entries: Iterable[Entry]) -> list[Member] | None:
    """Returns the router's last list of workers; None if there is none in `entries`."""
    found: list[Member] | None = None
    for entry in entries:
        if entry.kind in ("welcome", "members"):
            try:
                found = cast("Welcome | Members", unpack(entry)).members
            except RemoteProtocolError:
                continue
    return found


def as_of(known: Iterable[Member], told: Iterable[Member]) -> list[Member]:
    """Returns the known workers in their reported state; a missing worker is `stale`."""
    now = {member.name: member for member in told}
    return [
        msgspec.structs.replace(now[each.name], stream=each.stream)
        if each.name in now
        else msgspec.structs.replace(each, state="stale")
        for each in known
    ]


THE_TAP = ""
"""Name of the publisher that plays the router's tap; workers have other, non-empty names."""


class Programme(NamedTuple):
    """What is played."""

    members: Sequence[Member]
    """Workers with streams to play, each with the endpoint where it is played."""
    tap: str = ""
    """Endpoint of the recorded tap; empty: it is left out."""
    rids: AbstractSet[str] = frozenset()
    """Rows of other requests are left out; empty: of none."""


class Message(NamedTuple):
    """To be published as one message."""

    publisher: str
    topic: bytes
    entries: list[Entry]


class PlayStep(NamedTuple):
    """What one record leads to."""

    at_s: float
    """In the recording, from its beginning."""
    message: Message | None
    effects: list[Effect]


class PlayerCore:
    """Turns records into messages, and stands in for their router."""

    def __init__(self, programme: Programme, instance: str) -> None:
        """`instance`: random name of this player."""
        self._programme = programme
        self._pace = Pace()
        self._played = Played()
        self._names = {member.name for member in programme.members}
        self.router = StandIn(instance, programme.members, self._played, tap=programme.tap)
        self.n_malformed = 0
        """Entries whose bodies break their type: played like all others, and never repaired."""

    def step(self, record: Record) -> PlayStep:
        """The next record."""
        at_s = self._pace.at_s(record)
        message: Message | None = None
        effects: list[Effect] = []
        if isinstance(record, Stream):
            message = self._stream(record)
        elif isinstance(record, Tap):
            self._follow(record)
            message = self._tap(record)
        elif isinstance(record, ToldRecord):
            told = members_in(record.entries)
            if told is not None:
                members = as_of(self._programme.members, told)
                effects = [] if members == self.router.members else self.router.told(members)
        return PlayStep(at_s, message, effects)

    def published(self, message: Message) -> None:
        """The publisher has taken it: from now on it can be repaired."""
        if message.publisher == THE_TAP:
            return
        for entry in message.entries:
            try:
                self._played.add(entry)
            except RemoteProtocolError:
                self.n_malformed += 1

    def _stream(self, record: Stream) -> Message | None:
        name = publisher_of(record)
        entries = record.entries
        if self._programme.rids:
            entries = cut(entries, self._programme.rids)
        if name not in self._names or not entries or not record.topic:
            return None
        return Message(name, record.topic, entries)

    def _tap(self, tap: Tap) -> Message | None:
        if not self._programme.tap:
            return None
        mark = TapMark(tap.event, tap.n, tap.router_at, tap.connection, tap.name)
        return Message(THE_TAP, mark.topic, tap.entries)

    def _follow(self, tap: Tap) -> None:
        """Attempts that go on after what an earlier one has sampled can be repaired from 0."""
        for entry in tap.entries:
            if not is_generate_to_worker(tap.event, entry):
                continue
            try:
                prefix = unpack_as(Generate, entry).prefix
            except RemoteProtocolError:
                self.n_malformed += 1
                continue
            if prefix is not None:
                self._played.begins((entry.rid, entry.attempt), prefix)
