"""The rows that have been played, for who has missed some of them.

Pure. Bounded by bytes: attempts that nothing was played of for longest are forgotten.
Spec: docs/journal.md, "Playing"; docs/protocol.md, "Streams".
"""

from collections import OrderedDict
from typing import cast

import msgspec

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, Row, TokenColumns, rows_of
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Prefix, Repair, Repaired
from rolloutbus.bus.wire.messages.stream import Deltas

MAX_BYTES = 256 * 1024 * 1024


class _Rows:
    """The tokens of one attempt, from the first that was recorded without a gap after it."""

    __slots__ = ("held", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.held = TokenColumns()

    @property
    def end(self) -> int:
        return self.start + self.held.n_tokens

    @property
    def size_bytes(self) -> int:
        return 3 * len(self.held.tokens)

    def put_after(self, row: Row) -> None:
        """Go on with the next row."""
        if row.start > self.end:  # the recorder has missed some: nobody can repair across that
            self.start, self.held = row.start, TokenColumns()
        self.held.append(row)

    def put_before(self, prefix: Prefix) -> None:
        """Begin with what an earlier attempt has sampled."""
        after, self.start, self.held = self.part(self.start), 0, TokenColumns()
        self.held.append(Row(0, *msgspec.structs.astuple(prefix)))
        self.held.append(after)

    def part(self, start: int) -> Row:
        """From token `start` of the request on."""
        row = self.held.part(start - self.start, self.held.n_tokens)
        return row._replace(start=start)


class Played:
    """What a worker keeps of its requests, for all workers of a recording."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._rows: OrderedDict[tuple[str, Attempt], _Rows] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """Something that has been published.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        if entry.kind != "deltas":
            return
        for rid, attempt, row in rows_of(cast("Deltas", unpack(entry))):
            self._row((rid, attempt), row)
        while self._size_bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._size_bytes -= oldest.size_bytes

    def begins(self, key: tuple[str, Attempt], prefix: Prefix) -> None:
        """An attempt that goes on after `prefix`; its rows may have come before this word."""
        n_bytes = len(prefix.tokens)
        behaviour = prefix.behaviour_logprobs or prefix.logprobs
        if {len(prefix.logprobs), len(behaviour)} != {n_bytes} or n_bytes % TOKEN_BYTES:
            return  # whatever a client sent there, no worker took it
        rows = self._rows.setdefault(key, _Rows(n_bytes // TOKEN_BYTES))
        if rows.start == n_bytes // TOKEN_BYTES > 0:
            self._size_bytes -= rows.size_bytes
            rows.put_before(prefix)
            self._size_bytes += rows.size_bytes

    def repaired(self, repair: Repair) -> Repaired | Problem:
        """What has been played of an attempt from token `start` on."""
        rows = self._rows.get((repair.rid, repair.attempt))
        if rows is None:
            why = "nothing of this attempt has been played, or so long ago that it is forgotten"
            return Problem("bad_request", why, "not_started", field="rid")
        if not rows.start <= repair.start <= rows.end:
            why = f"start is {repair.start}; tokens {rows.start} to {rows.end} have been played"
            return Problem("bad_request", why, "not_started", field="start")
        return Repaired(*rows.part(repair.start))

    def _row(self, key: tuple[str, Attempt], row: Row) -> None:
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows(row.start)
        self._rows.move_to_end(key)
        if row.start >= rows.end and row.tokens:
            self._size_bytes -= rows.size_bytes
            rows.put_after(row)
            self._size_bytes += rows.size_bytes
