"""What a request asked to be told of each token, gathered while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rolloutbus.bus.wire.arrays import AnyArray, array_of
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.engine_worker.engine import Float32s, Int32s

NO_FLOATS: Float32s = np.zeros(0, np.float32)
NO_IDS: Int32s = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Of one token."""

    top_logprobs: Float32s
    """float32 [k], likeliest first."""
    top_token_ids: Int32s
    """int32 [k]."""
    logprobs_of: Float32s
    """float32 [c]."""
    support: Int32s
    """int32 [s]: ids that it was sampled from."""


@dataclass(slots=True)
class WantedTokens:
    """Of all tokens that one execution samples."""

    want: Want
    rows: list[TokenDetails] = field(default_factory=list[TokenDetails])
    n_cached: int | None = None
    """Tokens found in the prefix cache when it began; None: it has not."""

    def arrays(self) -> Mapping[str, Array]:
        """As the result carries them; see docs/protocol.md, "Arrays"."""
        rows, want = self.rows, self.want
        found: dict[str, AnyArray] = {}
        if k := want.top_logprobs:
            found["top_logprobs"] = stacked([row.top_logprobs for row in rows], k, "float32")
            found["top_token_ids"] = stacked([row.top_token_ids for row in rows], k, "int32")
        if c := len(want.logprobs_of):
            found["logprobs_of"] = stacked([row.logprobs_of for row in rows], c, "float32")
        if want.sampling_mask:
            found["sampling_mask"] = np.concatenate([NO_IDS, *(row.support for row in rows)])
            counts = [len(row.support) for row in rows]
            found["sampling_mask_counts"] = np.array(counts, np.int32)
        if want.cached_tokens:
            found["cached_tokens"] = np.array([self.n_cached or 0], np.int32)
        return {name: array_to_send(values) for name, values in found.items()}


def array_to_send(values: AnyArray) -> Array:
    """An array for the wire; one that is too large stays too large for a result, and is empty."""
    if values.nbytes > MAX_PIECE_BYTES:
        return Array("uint8", (MAX_PIECE_BYTES + 1,), bytes(MAX_PIECE_BYTES + 1))
    return array_of(values)


def stacked(rows: "list[Float32s] | list[Int32s]", width: int, dtype: str) -> AnyArray:
    """One row per token, [n, width]; also of none."""
    return np.array(rows, dtype).reshape(len(rows), width)
