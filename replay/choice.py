"""What is to be recorded: everything, or what belongs to some clients, sessions and policies.

Pure. Which requests those are shows when they are asked for.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

import msgspec

from rolloutbus.bus.wire.codec import topic_of, unpack
from rolloutbus.bus.wire.commands import with_trait
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Fenced, Lost, Queued
from rolloutbus.bus.wire.messages.generation import Deltas, Idle
from rolloutbus.bus.wire.validation import check_name

MAX_CHOSEN = 100_000
"""Requests that are remembered; the oldest are forgotten."""
OF_THE_FLEET = with_trait("versioned") | {
    *("hello", "welcome", "members", "dismissed", "goodbye", "rejected", "update_progress"),
}
"""What happens to members and weights belongs to every recording."""


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names; a request must match each list that is not empty."""

    client: list[str] = []
    session: list[str] = []
    policy: list[str] = []

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return not (self.client or self.session or self.policy)

    @property
    def text(self) -> str:
        """`client=a,session=b`; empty for everything."""
        fields = (("client", self.client), ("session", self.session), ("policy", self.policy))
        return ",".join(f"{name}={each}" for name, values in fields for each in values)


def filter_in(text: str) -> Filter:
    """The filter that a text like `session=a,client=b` asks for; of one name twice, either.

    Raises:
        SettingsError: it asks for something else.
    """
    found: dict[str, list[str]] = {"client": [], "session": [], "policy": []}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if name not in found or not equals:
            raise SettingsError(f"filter: {part!r} is not client=, session= or policy= and a name")
        problem = check_name(value, field=name)
        if problem is not None:
            raise SettingsError(f"filter: {problem.message}")
        found[name].append(value)
    return Filter(**found)


def rids_in(entry: Entry) -> set[str]:
    """The requests that an entry speaks of; garbage speaks of none."""
    rids = {entry.rid.partition("@")[0]} if entry.rid else set[str]()
    try:
        match entry.kind:
            case "deltas" | "idle" | "queued":
                rids.update(cast("Deltas | Idle | Queued", unpack(entry)).rids)
            case "accepted" | "ack" | "lost" | "fenced":
                items = cast("Accepted | Ack | Lost | Fenced", unpack(entry)).items
                rids.update(rid.partition("@")[0] for rid, _ in items)
            case _:
                pass
    except RemoteProtocolError:
        pass
    return rids


class Choice:
    """Knows which entries a filter asks for."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted
        self._topics = frozenset(map(topic_of, wanted.client))
        self._is_by_request = bool(wanted.session or wanted.policy)
        self._chosen: OrderedDict[str, None] = OrderedDict()

    def routed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Returns the wanted ones among the entries that crossed the router."""
        return [entry for entry in entries if self._is_routed(entry)]

    def wants(self, rid: str) -> bool:
        """Whether this request is wanted, as far as is known by now."""
        return not self._is_by_request or rid in self._chosen

    def is_published(self, topic: bytes, entries: Iterable[Entry]) -> bool:
        """Whether a worker's message is wanted, whole, because a chosen request is in it."""
        if self._topics and topic not in self._topics:
            return False
        if not self._is_by_request:
            return True
        return any(rid in self._chosen for entry in entries for rid in rids_in(entry))

    def _is_routed(self, entry: Entry) -> bool:
        if entry.kind in OF_THE_FLEET:
            return True
        if entry.place is not None:
            self._judge(entry)
        rids = rids_in(entry)
        if self._is_by_request:
            return any(rid in self._chosen for rid in rids)
        return any(rid.rpartition("/")[0] in self._wanted.client for rid in rids)

    def _judge(self, entry: Entry) -> None:
        wanted, place = self._wanted, entry.place
        assert place is not None
        if (
            (not wanted.client or entry.rid.rpartition("/")[0] in wanted.client)
            and (not wanted.session or place.session in wanted.session)
            and (not wanted.policy or place.policy in wanted.policy)
        ):
            self._chosen[entry.rid] = None
            self._chosen.move_to_end(entry.rid)
            if len(self._chosen) > MAX_CHOSEN:
                self._chosen.popitem(last=False)
