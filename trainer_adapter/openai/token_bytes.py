"""The bytes of a token whose text has an incomplete character, by what its vocabulary calls it.

Only tokens together make such a character: the text of one alone says that something is missing,
and not what.
"""

import re
from collections.abc import Mapping

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""What sentencepiece calls a byte."""


def token_bytes(name: object, text: str) -> list[int] | None:
    """The bytes of such a token, 0 to 255 each; None: they cannot be told.

    Args:
        name: what the vocabulary calls it.
        text: what it is decoded to, by itself.
    """
    if name == text:
        return list(text.encode())
    if not isinstance(name, str):
        return None
    if piece := _BYTE_PIECE.fullmatch(name):
        told = bytes([int(piece[1], 16)])
    elif all(letter in _BYTE_OF_LETTER for letter in name):
        told = bytes(_BYTE_OF_LETTER[letter] for letter in name)
    else:
        return None
    # A name that only looks like bytes is decoded to something else.
    return list(told) if told.decode(errors="replace") == text else None


def _byte_of_letter() -> Mapping[str, int]:
    """The byte that each letter stands for in names of byte-level vocabularies.

    Source: `bytes_to_unicode` of GPT-2's encoder.py: printable bytes stand for themselves.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(0x100)}


_BYTE_OF_LETTER = _byte_of_letter()
