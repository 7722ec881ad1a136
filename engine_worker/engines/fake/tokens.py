"""The tokens of the fake engine: a pure function, so that anyone can say what must come."""

import hashlib
import struct

FAKE_VOCAB_SIZE = 32_000
FAKE_EOS = 0
"""Never drawn: fake requests end at their limit or at a stop id of their own."""


def fake_token(prompt: bytes, seed: int, index: int, version: int) -> int:
    """Token `index` of a request, in [1, FAKE_VOCAB_SIZE).

    Args:
        prompt: int32 [n_prompt_tokens] as little-endian bytes.
        seed: of the request; 0 when it has none.
        index: from the first generated token, a resumed prefix included.
        version: of the weights.
    """
    return token_after(prompt_digest(prompt), seed, index, version)


def fake_logprob(token: int) -> float:
    """The logprob that the fake engine reports for `token`, exact in float32."""
    return -1.0 - (token % 1024) / 1024.0


def prompt_digest(prompt: bytes) -> bytes:
    """What a prompt contributes to its tokens, 16 bytes."""
    return hashlib.blake2b(prompt, digest_size=16).digest()


def token_after(digest: bytes, seed: int, index: int, version: int) -> int:
    """`fake_token`, for a prompt whose digest is known."""
    place = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, version)
    drawn = hashlib.blake2b(place, key=digest, digest_size=8).digest()
    return 1 + int.from_bytes(drawn, "little") % (FAKE_VOCAB_SIZE - 1)
