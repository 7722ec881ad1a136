"""Characters that are spread over several tokens, and what decoders make of a part of one."""

from collections.abc import Callable, Sequence

CUT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder returns for an incomplete character."""
BYTES_PER_CHAR = 4
"""Of UTF-8: a character may be spread over so many tokens."""


def n_whole_chars(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> int:
    """Characters of these tokens, without one whose end is missing."""
    # It is left out with its tokens: it may make a decoder doubt those before it.
    for n in range(len(tokens), max(0, len(tokens) - BYTES_PER_CHAR), -1):
        text = decode([*tokens[:n]])
        if not text.endswith(CUT):
            return len(text)
    if len(tokens) < BYTES_PER_CHAR:
        return 0
    return len(decode([*tokens]).rstrip(CUT))  # no characters at all, but bytes
