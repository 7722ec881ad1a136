"""Cutting what a worker published down to the rows of some requests.

Pure. A message that speaks of nothing else stays the bytes that it was.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import cast

import msgspec

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.stream import Deltas, Idle


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
