"""The requests of a journal that were sampled to their end: what was asked for, and what came.

Pure. Spec: docs/journal.md.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import cast

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES
from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry, Placement
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Generate, Generated
from rolloutbus.replay.journal.records import Record, Tap
from rolloutbus.replay.rollouts.trajectories import MAX_DONE


@dataclass(frozen=True, slots=True)
class Answered:
    """One request and its result."""

    rid: str
    generate: Generate
    """As its client sent it first."""
    place: Placement
    result: Generated


class AnsweredRequests:
    """Reads records; an iterator of requests that finished, in the order of their ends."""

    def __init__(self, records: Iterable[Record], rids: AbstractSet[str] = frozenset()) -> None:
        """`rids`: of these only; empty: of all."""
        self._records = records
        self._rids = rids
        self._open: dict[str, tuple[Generate, Placement]] = {}
        self._done: OrderedDict[str, None] = OrderedDict()
        """Whose ending came: whatever comes of them again is a copy."""
        self.n_unfinished = 0
        """Requests that ended otherwise."""
        self.n_malformed = 0

    def __iter__(self) -> Iterator[Answered]:
        """Raises what the journal raises that the records come from."""
        for record in self._records:
            if not isinstance(record, Tap):
                continue
            for entry in record.entries:
                if self._rids and entry.rid not in self._rids:
                    continue
                try:
                    found = self._heard(record.event, entry)
                except RemoteProtocolError:
                    self.n_malformed += 1
                    continue
                if found is not None:
                    yield found

    def _heard(self, event: str, entry: Entry) -> Answered | None:
        if entry.rid in self._done:
            return None
        if event == "received" and entry.kind == "generate" and entry.place is not None:
            self._open.setdefault(entry.rid, (cast("Generate", unpack(entry)), entry.place))
        elif event == "sent" and entry.kind in ENDINGS:
            asked = self._open.pop(entry.rid, None)
            if asked is None:
                return None
            self._done[entry.rid] = None
            if len(self._done) > MAX_DONE:
                self._done.popitem(last=False)
            if entry.kind == "finished" and entry.attempt != NO_ATTEMPT:
                result = cast("Generated", unpack_result("generate", entry))
                if len(result.logprobs) != len(result.tokens) or len(result.tokens) % TOKEN_BYTES:
                    raise RemoteProtocolError("a result with columns of unequal length")
                return Answered(entry.rid, *asked, result)
            self.n_unfinished += 1
        return None
