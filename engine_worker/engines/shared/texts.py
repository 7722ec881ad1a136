"""Text of token ids: the tokenizer in a model's directory, and where an output is to stop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import regex
from transformers import PreTrainedTokenizerFast

from rolloutbus.bus.cut_characters import BYTES_PER_CHAR, CUT, n_whole_chars
from rolloutbus.bus.wire.messages.endings import Problem

SEARCH_S = 0.25
"""For the patterns of one request after one token: one that backtracks without end must not hold
the other requests up."""
LOOK_BACK_CHARS = 256
"""Of the text of `min_new_tokens`, in which matches of patterns may begin: each is looked at again
after each token."""
_CALL = regex.compile(r"\(\?(?:R|[-+]?[0-9]|&|P>)")
"""Python's `re` has none, and one that calls itself without end heeds no limit of time."""
_INERT = regex.compile(r"(?s)\\.|\(\?#[^)]*\)|\[\^?\]?(?:\\.|[^\]\\])*\]")
"""What calls nothing, whatever it looks like: an escape, a comment, a class of characters."""
_ESCAPE = regex.compile(r"(?s)\\.")
_OTHER_SYNTAX = regex.compile(r"\(\?(?:[A-Za-z0-9]*[xV]|#[^)]*\\)")
"""Flags by which comments begin with `#`, or classes hold classes, and comments with escapes: then
only escapes are inert."""

Decode = Callable[[Sequence[int]], str]

NO_TOKENIZER = "the model's directory has no tokenizer.json; put it there"
TOO_SLOW = Problem(
    "bad_request",
    f"a pattern took more than {SEARCH_S:g} s to be looked for; simplify it",
    "failed",
    field="sampling.stop_regex",
)


def tokenizer_of(model: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model's directory, if it has a `tokenizer.json`.

    Raises:
        ValueError: it is broken.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        return None
    # It comes with transformers.
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        core: Any = Tokenizer.from_file(str(path))
    # The package raises bare Exceptions.
    except Exception as error:
        raise ValueError(f"model: {path} is not a tokenizer: {error}") from error
    return PreTrainedTokenizerFast(tokenizer_object=core)


def decoder_of(tokenizer: PreTrainedTokenizerFast) -> Decode:
    """What turns token ids to text, special tokens included."""
    core: Any = tokenizer.backend_tokenizer
    return lambda tokens: core.decode(list(tokens), skip_special_tokens=False)


class StopTexts:
    """The stop texts and patterns of one request, looked for after each of its tokens.

    What began in an earlier attempt counts. Patterns see the whole output so far. What ends within
    the first `min_new_tokens` tokens is none.
    """

    def __init__(
        self,
        decode: Decode,
        texts: Sequence[str],
        patterns: Sequence[str],
        search_s: float | None = SEARCH_S,
        *,
        min_new_tokens: int = 0,
    ) -> None:
        """`search_s`: None, where several processes must come to the same end: no limit.

        Raises:
            ValueError: a pattern is none; with the pattern.
        """
        self._decode = decode
        self._texts = texts
        self._patterns = [compiled(pattern) for pattern in patterns]
        self._search_s = search_s
        self._min_new_tokens = min_new_tokens
        # Whatever lies wholly before the last token was found when that was sampled.
        self._n_tail = BYTES_PER_CHAR * (max(map(len, texts), default=0) + 1)
        self._n_exempt_output: int | None = None
        """The last place in the output where no match may end yet; None: not counted yet."""
        self._output = ""
        """Text of the tokens read so far; only kept for patterns."""
        self._n_read = 0
        self._n_before = 0
        """Tokens before those that were read last: a word's beginning tells by its neighbour
        whether there is a space before it, so what is new is decoded after what was."""

    def __call__(self, tokens: Sequence[int]) -> bool | Problem:
        """Whether the last of these tokens, all that were generated, completes one."""
        if len(tokens) <= self._min_new_tokens:
            return False
        if self._texts:
            first = max(0, len(tokens) - self._n_tail)
            tail = self._decode(tokens[first:])
            n_exempt = self._n_exempt(tokens, first)
            for text in self._texts:
                # One that begins among the exempt characters may end after them.
                if tail.find(text, max(0, n_exempt - len(text) + 1)) >= 0:
                    return True
        return self._matches(tokens) if self._patterns else False

    def _matches(self, tokens: Sequence[int]) -> bool | Problem:
        known = self._decode(tokens[self._n_before : self._n_read])
        text = self._decode(tokens[self._n_before :])
        if len(text) <= len(known) or text.endswith(CUT):
            return False
        self._output += text[len(known) :]
        self._n_before, self._n_read = self._n_read, len(tokens)
        try:
            if self._n_exempt_output is None:
                # Without a least number even a match of no characters counts, at the beginning.
                self._n_exempt_output = self._n_exempt(tokens, 0) if self._min_new_tokens else -1
            n_exempt = self._n_exempt_output
            first = max(0, n_exempt - LOOK_BACK_CHARS)
            return any(
                found.end() > n_exempt
                for each in self._patterns
                for found in each.finditer(
                    self._output, first, overlapped=True, timeout=self._search_s
                )
            )
        except TimeoutError:
            return TOO_SLOW

    def _n_exempt(self, tokens: Sequence[int], first: int) -> int:
        """Characters of the text from token `first` on that come before `min_new_tokens`."""
        return n_whole_chars(self._decode, tokens[first : self._min_new_tokens])


def compiled(pattern: str) -> Any:  # noqa: ANN401 - the package has no types
    """A pattern of `stop_regex`.

    Raises:
        ValueError: it is none; with the pattern.
    """
    inert = _ESCAPE if _OTHER_SYNTAX.search(pattern) else _INERT
    if _CALL.search(inert.sub("_", pattern)):
        raise ValueError(f"{pattern[:100]!r}: a pattern cannot call a pattern")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:100]!r}: {error}") from error
