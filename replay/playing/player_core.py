"""What a player does with each record of a journal: what is published, where, and when.

Pure. Spec: docs/journal.md, "Playing".
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, cast

from rolloutbus.bus.streams.tap import TapMark
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.replay.journal.records import Record, Stream, Tap, ToldRecord
from rolloutbus.replay.playing.cut import cut
from rolloutbus.replay.playing.pace import Pace
from rolloutbus.replay.playing.played import Played
from rolloutbus.replay.playing.stand_in import Effect, StandIn
from rolloutbus.replay.playing.survey import as_of, members_in, publisher_of
from rolloutbus.replay.recording.gaps import is_generate_to_worker

THE_TAP = ""
"""The publisher of what the router's tap has told; workers have names."""


class Programme(NamedTuple):
    """What is played."""

    members: Sequence[Member]
    """Whose streams, each with the endpoint where they are played."""
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

    def receive(self, peer: Peer, entries: Sequence[Entry], now: float) -> list[Effect]:
        """A batch from a client; `now` in seconds of any clock."""
        return self.router.receive(peer, entries, now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes."""
        return self.router.tick(now)

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
                prefix = cast("Generate", unpack(entry)).prefix
            except RemoteProtocolError:
                self.n_malformed += 1
                continue
            if prefix is not None:
                self._played.begins((entry.rid, entry.attempt), prefix)
