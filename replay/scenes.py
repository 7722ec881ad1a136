"""Scenes of a journal: what a subscriber would have been told, and when, for people who watch.

Pure but for the reading. Nothing is published: see `player.py` for that.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from rolloutbus.replay.choice import Choice, Filter
from rolloutbus.replay.journal.records import Record, Stream, Tap, ToldRecord
from rolloutbus.replay.player_core import Pace, members_in
from rolloutbus.replay.stream.core import AskRepair, SubscriberCore, Unrepaired
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.stream.events import StreamEvent

NOT_RECORDED = Unrepaired("it is not in the journal", is_final=True)


class Scene(NamedTuple):
    """Events of one moment."""

    at_s: float
    """Seconds since the recording began."""
    events: list[StreamEvent]


def scenes(
    journal: Iterable[Record], wanted: Filter | None = None, rids: Collection[str] = ()
) -> Iterator[Scene]:
    """Yield the moments of a recording at which something can be seen, in order.

    Args:
        journal: its records.
        wanted: streams of these clients and sessions; None: all.
        rids: of these requests; empty: of all.
    """
    choice = Choice(wanted or Filter())
    core = SubscriberCore(SubscriberSettings(), choice, rids)
    pace = Pace()
    for record in journal:
        at_s = pace.at_s(record)
        if isinstance(record, Stream) and not choice.is_published(record.topic, record.entries):
            continue
        asked = [*_heard(core, record, at_s), *core.tick(at_s)]
        while asked:  # nobody is left who could be asked for what the recorder has missed
            asked += core.answered(asked.pop(), NOT_RECORDED, at_s)
        events: list[StreamEvent] = []
        while (event := core.events.take(0)) is not None:
            events.append(event)
        if events:
            yield Scene(at_s, events)


def _heard(core: SubscriberCore, record: Record, at_s: float) -> list[AskRepair]:
    match record:
        case Stream():
            return core.published(record.topic, record.entries, 0, at_s)
        case Tap():
            return core.tapped(record.entries, at_s)
        case ToldRecord():
            members = members_in(record.entries)
            return core.members(members, at_s) if members is not None else []
        case _:
            return []
