"""The text of a token stream, in pieces that never have to be taken back."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

CUT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for a character of which it has not all bytes."""


class TextPieces:
    """A piece is held back while it may still change, or be the beginning of a stop text."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._n_held = max((len(text) for text in stop), default=1) - 1
        self._tokens: list[int] = []
        self._text = ""
        """Of the tokens that were read."""
        self._n_read = 0
        self._n_before = 0
        """Tokens before those that were read last: a word's beginning tells by its neighbour
        whether there is a space before it, so what is new is decoded after what was."""
        self._n_said = 0

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> str:
        """Tokens from index `start` on; the text that is new.

        After lost work that had to be sampled anew, what was said already stays said.
        """
        if start < self._n_read:
            self._text, self._n_read, self._n_before = "", 0, 0
        self._tokens[start:] = tokens
        self._read(is_last=is_last)
        text = without_stop(self._text, self._stop)
        end = len(text) if is_last else len(text) - self._n_held
        if end <= self._n_said:
            return ""
        piece, self._n_said = text[self._n_said : end], end
        return piece

    def _read(self, *, is_last: bool) -> None:
        known = self._decode(self._tokens[self._n_before : self._n_read])
        text = self._decode(self._tokens[self._n_before :])
        if len(text) > len(known) and (is_last or not text.endswith(CUT)):
            self._text += text[len(known) :]
            self._n_before, self._n_read = self._n_read, len(self._tokens)


def without_stop(text: str, stop: Sequence[str]) -> str:
    """Up to the first stop text, as OpenAI's answers are."""
    ends = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(ends)] if ends else text
