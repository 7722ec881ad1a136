"""Stop texts inside a scheduler: which token of a step completes one, and what came before."""

from collections.abc import Sequence
from typing import Any

import pytest

from rolloutbus.engine_worker.engines.sglang.inside.text_stops import TextCheck
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.shared.texts import TOO_SLOW, StopTexts

WORDS = ["", "E", "N", "D", "END", "the ", "a" * 60]
"""Text of each token: END is one of them, and may be spelt in three."""
STOP, SLOW = "stop", "slow"
END_OF_TEXT = 0


class Request:
    """The part of SGLang's that is used."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.finished_reason: object = None
        self.finished_len: int | None = None

    def _check_token_based_finish(self, new_accepted_tokens: Sequence[int]) -> bool:
        """As SGLang's own."""
        if END_OF_TEXT not in new_accepted_tokens:
            return False
        first = len(self.output_ids) - len(new_accepted_tokens)
        self.finished_reason = "id"
        self.finished_len = first + list(new_accepted_tokens).index(END_OF_TEXT) + 1
        return True


@pytest.fixture(autouse=True)
def _reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's reasons, without SGLang."""

    def stopped(token: int) -> object:
        return STOP, token

    def aborted(message: str, status: int) -> object:
        return message, status

    monkeypatch.setattr(upstream, "stop_reason", stopped)
    monkeypatch.setattr(upstream, "abort_reason", aborted)


def checked(
    texts: Sequence[str] = ("END",),
    patterns: Sequence[str] = (),
    kept: Sequence[int] = (),
    least: int = 0,
) -> tuple[Request, TextCheck]:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    request: Any = Request()
    stops = StopTexts(decode, texts, patterns, min_new_tokens=least)
    return request, TextCheck(request, stops, kept)


def ends_at(request: Request, check: TextCheck, steps: Sequence[Sequence[int]]) -> int | None:
    """How many tokens of the output are the request's; None: it goes on."""
    for new in steps:
        request.output_ids += new
        if check(len(new)):
            return request.finished_len
    return None


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([[5], [4]], 2),
        ([[5], [1], [2], [3]], 4),  # SGLang looks at the last two tokens: END is one for it
        ([[5], [1, 2, 3, 5, 5]], 4),  # several in a step, as with speculation
        ([[1], [2], [5], [3]], None),
    ],
)
def test_the_token_that_completes_a_text_is_the_last_one(
    steps: Sequence[Sequence[int]], found: int | None
) -> None:
    assert ends_at(*checked(), steps) == found


@pytest.mark.parametrize(
    ("new", "found", "why"),
    [
        ([5, 0, 4], 2, "id"),
        ([0, 1, 2, 3], 1, "id"),
        ([4, 0, 5], 1, (STOP, 4)),
        ([5, 4, 5, 0], 2, (STOP, 4)),
    ],
)
def test_of_a_stop_token_and_a_text_in_one_step_the_first_is_the_end(
    new: Sequence[int], found: int, why: object
) -> None:
    request, check = checked()
    assert ends_at(request, check, [[5], new]) == 1 + found
    assert request.finished_reason == why


def test_what_was_kept_of_earlier_attempts_may_have_begun_it() -> None:
    request, check = checked(kept=[5, 1, 2])
    assert check.end_of_kept() is None
    assert ends_at(request, check, [[3]]) == 1
    assert request.finished_reason == (STOP, 3)


def test_what_was_kept_may_be_all_of_it() -> None:
    assert checked(kept=[5, 4])[1].end_of_kept() == (STOP, 4)
    assert checked(kept=[])[1].end_of_kept() is None


def test_a_text_ends_nothing_before_the_least_number_of_tokens() -> None:
    assert checked(kept=[4], least=1)[1].end_of_kept() is None
    assert ends_at(*checked(least=2), [[4], [5], [5], [5]]) is None
    assert ends_at(*checked(least=2), [[4], [5], [5], [4]]) == 4
    assert ends_at(*checked(least=2), [[1], [2], [3, 5]]) == 3


def test_a_pattern_that_takes_too_long_ends_its_request_with_the_reason() -> None:
    request, check = checked([], ["(a|aa)+[b-z]"])
    ends_at(request, check, [[6]])
    assert request.finished_reason == (TOO_SLOW.message, 408)
