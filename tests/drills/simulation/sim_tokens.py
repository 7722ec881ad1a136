"""What the simulated engine samples: a pure function, so that anyone can say what must come."""

import hashlib
from functools import lru_cache

import numpy as np

VOCAB_SIZE = 32_000
MAX_TOKENS = 128
"""Longest continuation; all of it is drawn at once, and cut to size."""
TOKEN_BYTES = 4
_LOGPROBS = (-1.0 - (np.arange(VOCAB_SIZE) % 1024) / 1024.0).astype("<f4")
"""By token."""


@lru_cache(maxsize=512)
def continuation(prompt: bytes, seed: int, version: int) -> tuple[bytes, bytes]:
    """(int32 tokens, float32 logprobs) [MAX_TOKENS] of a prompt under one weight version."""
    key = hashlib.shake_128(b"%d/%d/" % (seed, version) + prompt)
    drawn = np.frombuffer(key.digest(TOKEN_BYTES * MAX_TOKENS), "<u4")
    tokens = 1 + drawn % (VOCAB_SIZE - 1)
    return tokens.tobytes(), _LOGPROBS[tokens].tobytes()


def expected(prompt: bytes, seed: int, versions: list[tuple[int, int]]) -> tuple[bytes, bytes]:
    """(tokens, logprobs) that must have been sampled where `versions` are the runs."""
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    start = 0
    for version, n_tokens in versions:
        stop = start + TOKEN_BYTES * n_tokens
        columns = continuation(prompt, seed, version)
        tokens.append(columns[0][start:stop])
        logprobs.append(columns[1][start:stop])
        start = stop
    return b"".join(tokens), b"".join(logprobs)
