"""What a journal has to play: whose streams, how many messages, how long it took.

Pure.
"""

from collections.abc import Iterable
from typing import cast

import msgspec

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Member, Members, Welcome
from rolloutbus.replay.journal.records import Record, Stream, Tap, ToldRecord
from rolloutbus.replay.playing.pace import Pace

UNKNOWN_POLICY = "default"


class JournalSurvey:
    """Taken before anything is played: a listener must know of all publishers at once."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._told: dict[str, Member] = {}
        self._heard: dict[str, Member] = {}
        self.n_messages = 0
        """Of streams."""
        self.n_tapped = 0
        """Of the router's tap."""
        self.length_s = 0.0
        """From the first record to the last, while somebody recorded."""

    @property
    def workers(self) -> dict[str, Member]:
        """Who has published anything, as first told of; `stream` is where it was."""
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
    """The last list of workers that the router told; None: it told none."""
    found: list[Member] | None = None
    for entry in entries:
        if entry.kind in ("welcome", "members"):
            try:
                found = cast("Welcome | Members", unpack(entry)).members
            except RemoteProtocolError:
                continue
    return found


def as_of(known: Iterable[Member], told: Iterable[Member]) -> list[Member]:
    """The known workers in the state that was told; who is not there any more is `stale`."""
    now = {member.name: member for member in told}
    return [
        msgspec.structs.replace(now[each.name], stream=each.stream)
        if each.name in now
        else msgspec.structs.replace(each, state="stale")
        for each in known
    ]
