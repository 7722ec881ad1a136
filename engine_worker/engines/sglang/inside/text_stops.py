"""Stop texts and patterns of requests, looked for inside a scheduler process.

SGLang looks for them only where it keeps its tokenizer, and only in as many of the last tokens as
it would itself write the text with: a model that spells a text in more tokens runs past it. Here
they are looked for as on the transformers engine, in the text of all that was generated, kept
tokens of earlier attempts included.
"""

import weakref
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Self

from rolloutbus.engine_worker.engines.sglang.schedulers.rules import Rules
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject
from rolloutbus.engine_worker.engines.shared.texts import (
    NO_TOKENIZER,
    SEARCH_S,
    TOO_SLOW,
    Decode,
    StopTexts,
    decoder_of,
    tokenizer_of,
)


class Texts(NamedTuple):
    """What a scheduler makes text of tokens with."""

    decode: Decode | None
    """None: it cannot."""
    why_none: str
    """Why it cannot; empty: it can."""
    search_s: float | None
    """As of `StopTexts`."""

    @classmethod
    def of(cls, scheduler: SglangObject) -> Self:
        """Read the tokenizer beside the model; SGLang's own stands in for a missing file."""
        arguments = scheduler.server_args
        # What a version lacks of these takes the features away, and no more.
        its_own = getattr(scheduler, "tokenizer", None)
        folder = getattr(arguments, "tokenizer_path", None) or arguments.model_path
        # Each rank judges for itself, and a limit of time might part them.
        is_alone = arguments.tp_size == arguments.pp_size == 1
        why_none = NO_TOKENIZER
        decode: Decode | None = None
        try:
            tokenizer = tokenizer_of(Path(folder))
        except ValueError as error:
            tokenizer, why_none = None, str(error)
        if tokenizer is not None:
            decode = decoder_of(tokenizer)
        elif its_own is not None:
            decode = lambda tokens: its_own.decode(list(tokens))  # noqa: E731 - a branch of three
        return cls(decode, "" if decode else why_none, SEARCH_S if is_alone else None)


NO_TEXTS = Texts(None, NO_TOKENIZER, None)
"""Of a scheduler that is not built yet."""


def watch(request: SglangObject, rules: Rules, texts: Texts, kept: Sequence[int]) -> None:
    """Let a request end with a text or a pattern of its rules.

    `kept`: tokens of earlier attempts. If they hold one already, nothing is sampled.
    """
    assert texts.decode is not None, "a feature that is not there"
    stops = StopTexts(
        texts.decode,
        rules.stop,
        rules.stop_regex,
        texts.search_s,
        min_new_tokens=rules.min_new_tokens,
    )
    check = TextCheck(weakref.proxy(request), stops, kept)
    request._check_str_based_finish = check  # noqa: SLF001 - the only door
    end = check.end_of_kept()
    if end is not None:
        # Its prompt is computed, and what is drawn after it is not told.
        request.to_finish, request.finished_len = end, 0


class TextCheck:
    """In place of SGLang's search in one request's output."""

    def __init__(self, request: SglangObject, stops: StopTexts, kept: Sequence[int]) -> None:
        """`request`: does not keep it alive."""
        self._request = request
        self._stops = stops
        self._tokens = [*kept]
        """All that was generated and read."""
        self._n_kept = len(kept)

    def end_of_kept(self) -> object | None:
        """SGLang's reason to end, if the kept tokens end it; None: it goes on."""
        return self._end() if self._tokens else None

    def __call__(self, new_accepted_len: int = 1) -> bool:
        """Whether one of the newest tokens ends the request, which then has SGLang's reason."""
        output = self._request.output_ids
        first = max(0, len(output) - new_accepted_len)
        n_read = len(self._tokens) - self._n_kept
        self._tokens += output[n_read:first]
        for place in range(max(n_read, first), len(output)):
            self._tokens.append(output[place])
            end = self._end()
            if end is not None:
                if self._has_ended(output[first:], place):
                    return True
                self._request.finished_reason = end
                self._request.finished_len = place + 1
                return True
        return False

    def _has_ended(self, new_tokens: Sequence[int], place: int) -> bool:
        """Whether the step has a stop token before this place, which then is the end.

        SGLang looks for those after the texts. With speculation the step goes on behind them.
        """
        is_stopped: bool = self._request._check_token_based_finish(new_tokens)  # noqa: SLF001 - the only door
        return is_stopped and self._request.finished_len <= place

    def _end(self) -> object | None:
        found = self._stops(self._tokens)
        if found is TOO_SLOW:
            return upstream.abort_reason(TOO_SLOW.message, HTTPStatus.REQUEST_TIMEOUT)
        return upstream.stop_reason(self._tokens[-1]) if found else None
