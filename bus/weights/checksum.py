"""The checksum of a bucket: what a GPU can compute of its own memory, unlike a digest.

Spec: docs/protocol.md, "Bucket". Every single flipped bit changes it, because each word counts an
odd number of times. It is no protection against somebody who means to deceive.
"""

from typing import Any

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes

CHUNK_WORDS = 1 << 15
"""So many at once on a CPU: what is made of them stays in its cache."""
_WORD_BYTES = 8
_MODULUS = 1 << 64


Array = Any
"""One-dimensional, numpy's or torch's: what both can do is all that is needed here."""


def checksum(content: Bytes) -> int:
    """Of bytes in memory, uint8 [n]; they begin at a multiple of 8."""
    return checksum_by(content, np.arange(1, 2 * CHUNK_WORDS, 2, dtype=np.uint64))


def checksum_by(content: Array, odd: Array) -> int:
    """Of bytes anywhere, uint8 [n], with the arithmetic of `odd`: 1, 3, 5, … as 64-bit integers.

    The length of `odd` is the number of words that are looked at in one go; no more memory is
    needed than for twice as many. Both are on the same device, whose queue is waited for once
    everything is in it.
    """
    n_words: int = len(content) // _WORD_BYTES
    tail = int.from_bytes(bytes(content[n_words * _WORD_BYTES :].tolist()), "little")
    total = tail * (2 * n_words + 1)
    if n_words == 0:
        return total  # torch cannot view nothing as words
    words = content[: n_words * _WORD_BYTES].view(odd.dtype)
    starts = range(0, n_words, len(odd))
    chunks = [words[start : start + len(odd)] for start in starts]
    sums = [(chunk.sum(), (chunk * odd[: len(chunk)]).sum()) for chunk in chunks]
    for start, (plain, weighted) in zip(starts, sums, strict=True):
        total += int(weighted) + 2 * start * int(plain)
    return total % _MODULUS
