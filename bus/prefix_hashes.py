"""Prefix hashes ("marks" on the wire): by them the router finds workers that cached a prompt.

A prompt is cut into units of tokens. The hash of a unit is seeded by that of the unit before it, so
it stands for all tokens up to its end. Few of these hashes are told: those after a number of units,
a *rung*, that has only zeros behind its three leading binary digits. So a beginning is known to
within a quarter of its length, and 32 hashes reach 32,768 tokens.
Spec: docs/protocol.md, "Prefix affinity".
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

UNIT_TOKENS = 64
UNIT_BYTES = 4 * UNIT_TOKENS
"""Of int32 tokens, little endian."""
MAX_MARKS = 32
"""Of one prompt."""
MARK_BYTES = 8


def is_rung(n_units: int) -> bool:
    """Whether a beginning of this many units has a mark."""
    zeros = n_units.bit_length() - 3
    return n_units > 0 and (zeros <= 0 or n_units & ((1 << zeros) - 1) == 0)


def _rungs(count: int) -> tuple[int, ...]:
    rungs: list[int] = []
    n_units = 0
    while len(rungs) < count:
        n_units += 1
        if is_rung(n_units):
            rungs.append(n_units)
    return tuple(rungs)


RUNGS = _rungs(MAX_MARKS)
"""Lengths of the beginnings that a prompt's hashes stand for, in units: 1 to 8, then four for each
doubling, to 512."""
MARKED_TOKENS = tuple(UNIT_TOKENS * rung for rung in RUNGS)
"""The same in tokens."""


class ChainLink(NamedTuple):
    """State of a chain of units."""

    chain: int = 0
    """Hash of the last full unit."""
    n_units: int = 0
    rest: bytes = b""
    """Tokens after it, less than a unit."""

    def extended(self, tokens: bytes) -> "tuple[ChainLink, list[int]]":
        """With int32 [n] tokens more; and the hashes on the way."""
        chain, n_units = self.chain, self.n_units
        held = self.rest + tokens
        end = len(held) - len(held) % UNIT_BYTES
        hashes: list[int] = []
        for start in range(0, end, UNIT_BYTES):
            chain = xxhash.xxh3_64_intdigest(held[start : start + UNIT_BYTES], seed=chain)
            n_units += 1
            if is_rung(n_units):
                hashes.append(chain)
        return ChainLink(chain, n_units, held[end:]), hashes


ROOT = ChainLink()
"""No tokens yet."""


def marks_of(prompt: bytes) -> bytes:
    """The hashes of a prompt, int32 [n] little endian, the shortest beginning first: uint64 [k]."""
    _, hashes = ROOT.extended(prompt[: UNIT_BYTES * RUNGS[-1]])
    return packed(hashes)


def packed(hashes: Iterable[int]) -> bytes:
    """Marks as uint64 [k], little endian."""
    all_hashes = tuple(hashes)
    return struct.pack(f"<{len(all_hashes)}Q", *all_hashes)


def unpacked(hashes: bytes) -> tuple[int, ...]:
    """Hashes that `packed` made; bytes that are no whole hash are left out."""
    count = len(hashes) // MARK_BYTES
    return struct.unpack_from(f"<{count}Q", hashes)
