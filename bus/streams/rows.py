"""The rows of a `deltas` message, which are its columns, cut at each request; that of a repair.

Spec: docs/protocol.md, "Streams".
"""

from collections.abc import Iterator

import msgspec

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, Row
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.ids import Attempt
from rolloutbus.bus.wire.messages.generation import Repaired
from rolloutbus.bus.wire.messages.stream import Deltas


def rows_of(deltas: Deltas) -> Iterator[tuple[str, Attempt, Row]]:
    """(rid, attempt, row) of one engine step's columns.

    Raises:
        RemoteProtocolError: the columns do not fit together.
    """
    n_rows = len(deltas.rids)
    columns = (deltas.attempts, deltas.seqs, deltas.counts, deltas.versions)
    n_bytes = TOKEN_BYTES * sum(deltas.counts)
    behaviour = deltas.behaviour_logprobs
    if (
        any(len(column) != n_rows for column in columns)
        or min(deltas.counts, default=0) < 0
        or len(deltas.tokens) != n_bytes
        or len(deltas.logprobs) != n_bytes
        or len(behaviour) not in (0, n_bytes)
    ):
        raise RemoteProtocolError("deltas: columns of unequal length")
    end = 0
    for rid, attempt, seq, count, version in zip(deltas.rids, *columns, strict=True):
        start, end = end, end + TOKEN_BYTES * count
        row = Row(
            seq,
            deltas.tokens[start:end],
            deltas.logprobs[start:end],
            [(version, count)],
            behaviour[start:end],
        )
        yield rid, attempt, row


def row_of_repaired(repaired: Repaired) -> Row | None:
    """What a worker has of a request; None if its columns do not fit together."""
    n_bytes = TOKEN_BYTES * sum(count for _, count in repaired.versions)
    sizes = {len(repaired.tokens), len(repaired.logprobs)}
    if sizes != {n_bytes} or len(repaired.behaviour_logprobs) not in (0, n_bytes):
        return None
    return Row(*msgspec.structs.astuple(repaired))
