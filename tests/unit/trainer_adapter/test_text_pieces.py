"""Pieces of a token stream's text: never taken back, and nothing of a stop text."""

import pytest

from rolloutbus.bus.cut_characters import CUT
from rolloutbus.trainer_adapter.client.text import (
    MAX_UNREAD,
    TextPieces,
    text_until_stop,
    without_stop,
)


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def said(text: str, stop: tuple[str, ...] = (), least: int = 0) -> list[str]:
    """One byte at a time."""
    pieces, raw = TextPieces(decode, stop, least), text.encode()
    return [pieces.add(i, [raw[i]], is_last=i == len(raw) - 1) for i in range(len(raw))]


def test_a_character_is_said_when_it_is_whole() -> None:
    assert said("aé€!") == ["a", "", "é", "", "", "€", "!"]


def test_the_beginning_of_a_stop_text_is_held_back_until_it_is_none() -> None:
    assert "".join(said("a en enough", ("end",))) == "a en enough"
    assert said("an", ("end",)) == ["", "an"]


@pytest.mark.parametrize("stop", [("end",), ("end", "nd"), ("never", "end")])
def test_a_stop_text_and_what_follows_are_not_said(stop: tuple[str, ...]) -> None:
    assert "".join(said("the end.", stop)) == "the "
    assert without_stop("the end.", stop) == "the "


@pytest.mark.parametrize(
    ("text", "stop", "least", "kept"),
    [
        ("an end, the end.", ("end",), 6, "an end, the "),
        ("an end, the end.", ("end",), 5, "an "),
        ("an end", ("end", "n en"), 6, "an end"),
        ("an é or é.", ("é",), 4, "an "),  # half of it is among the first four
        ("an é or é.", ("é",), 5, "an é or "),
        ("an end", ("end",), 40, "an end"),
    ],
)
def test_a_stop_text_within_the_least_number_of_tokens_is_kept(
    text: str, stop: tuple[str, ...], least: int, kept: str
) -> None:
    assert "".join(said(text, stop, least)) == kept
    assert text_until_stop(decode, list(text.encode()), stop, least) == kept


def decode_as_runs(tokens: list[int]) -> str:
    """As sentencepiece does: a run of bytes that is cut at its end is one of unknown characters."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return CUT * len(tokens)


@pytest.mark.parametrize(("least", "kept"), [(5, "éé"), (6, "éééa"), (3, "é"), (1, "")])
def test_a_cut_character_leaves_those_before_it_within_the_least_number(
    least: int, kept: str
) -> None:
    tokens = list("éééa".encode())
    assert text_until_stop(decode_as_runs, tokens, ["é"], least) == kept
    pieces = TextPieces(decode_as_runs, ["é"], least)
    streamed = [pieces.add(i, [each], is_last=i == 6) for i, each in enumerate(tokens)]
    assert "".join(streamed) == kept


def test_the_least_number_is_of_the_tokens_that_count_when_work_is_done_anew() -> None:
    pieces = TextPieces(decode, ("end",), 6)
    pieces.add(0, list("€ or s".encode()), is_last=False)
    pieces.add(0, list(b"an end an end"), is_last=True)
    assert pieces.text == "an end a"


def test_what_was_said_stays_said_when_work_is_done_anew() -> None:
    pieces = TextPieces(decode)
    assert pieces.add(0, list(b"abc"), is_last=False) == "abc"
    assert pieces.add(1, list(b"x"), is_last=False) == ""
    assert pieces.add(2, list(b"yz"), is_last=True) == "z"


def test_pieces_join_to_the_text_also_where_words_are_joined_by_spaces() -> None:
    words = ["the", "quick", "brown", "fox"] * 5
    pieces = TextPieces(lambda ids: " ".join(words[i] for i in ids))
    said = [pieces.add(i, [i], is_last=i == 19) for i in range(20)]
    assert "".join(said) == " ".join(words)
    assert said[1] == " quick"


def test_the_cost_of_a_piece_does_not_grow_with_the_text() -> None:
    n_decoded = 0

    def counting(tokens: list[int]) -> str:
        nonlocal n_decoded
        n_decoded += len(tokens)
        return decode(tokens)

    pieces = TextPieces(counting)
    for i in range(1000):
        pieces.add(i, [97], is_last=False)
    assert n_decoded < 5 * 1000


def test_the_text_so_far_is_that_of_the_tokens_that_count() -> None:
    pieces = TextPieces(decode, ("end",))
    pieces.add(0, list("é or en€".encode()), is_last=False)
    assert pieces.text == "é or e"
    pieces.add(6, list(b"no"), is_last=False)
    assert pieces.text == "é or "
    pieces.add(6, list("€ the end.".encode()), is_last=False)
    assert pieces.text == "é or € th"


@pytest.mark.parametrize("token", [0x80, 0])
def test_what_never_becomes_text_costs_no_more(token: int) -> None:
    n_decoded = 0

    def counting(tokens: list[int]) -> str:
        nonlocal n_decoded
        n_decoded += len(tokens)
        return decode([each for each in tokens if each])

    pieces = TextPieces(counting)
    for i in range(4000):
        pieces.add(i, [token], is_last=False)
    assert n_decoded < 4000 * 4 * MAX_UNREAD
    whole = pieces.add(4000, list(b" end"), is_last=True)
    assert pieces.text == decode([token] * 4000 if token else []) + " end"
    assert whole.endswith(" end")
