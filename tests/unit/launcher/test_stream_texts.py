"""What `tail` says of streams, whatever is lost of them and whatever a model says."""

from dataclasses import fields

import numpy as np
import pytest

from rolloutbus.cli.commands.tail import StreamTexts, as_line, drawn
from rolloutbus.replay.stream.events import (
    Demoted,
    Finished,
    GapFound,
    GapLost,
    LetGo,
    Restored,
    Tokens,
    WorkerJoined,
)
from rolloutbus.trainer_adapter.client.core.results import Int32s

WHERE = ("c/1", (1, 1), "w0")


def tokens(start: int, *ids: int) -> Tokens:
    values: Int32s = np.array(ids, np.int32)
    logprobs = values.astype(np.float32)
    return Tokens(*WHERE, start, values, logprobs, logprobs, version=3)


def finished(*ids: int, n_missing: int = 0, versions: int = 1) -> Finished:
    values: Int32s = np.array(ids, np.int32)
    logprobs = values.astype(np.float32)
    runs = [(version, 1) for version in range(versions)]
    return Finished(*WHERE, "stop", values, logprobs, logprobs, runs, n_missing)


def spelled(ids: object) -> str:
    """Token ids as code points."""
    assert isinstance(ids, list)
    return "".join(map(chr, ids))  # pyright: ignore[reportUnknownArgumentType] - of numbers


def test_open_streams_show_their_end_and_ended_ones_all() -> None:
    texts = StreamTexts(spelled)
    assert texts.heard(WorkerJoined("w0", "e", "p")) == ""
    assert texts.heard(tokens(0, *b"once upon")) == ""
    assert texts.heard(tokens(9, *b" a time")) == ""
    (stream,) = texts.open.values()
    assert texts.end_of(stream, 6) == "a time"
    assert texts.heard(finished(*b"once upon a time")) == (
        "c/1 (w0, v0, 16 tokens, stop)\nonce upon a time"
    )
    assert not texts.open


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert StreamTexts().heard(finished(3, 1, 4)).endswith("\n3,1,4")


def test_what_became_void_is_taken_back_also_behind_a_hole() -> None:
    texts = StreamTexts()
    texts.heard(tokens(0, 1, 2))
    texts.heard(GapLost(*WHERE, 2, 5, "gone"))
    texts.heard(tokens(5, 6, 7, 8))
    texts.heard(tokens(6, 9))
    assert texts.open["c/1"].tokens == [1, 2, 6, 9]
    assert "3 lost" in texts.heard(finished(1, 2, 6, 9, n_missing=3))


def test_a_stream_of_two_versions_says_both() -> None:
    assert "v0+v1" in StreamTexts().heard(finished(1, 2, versions=2))


def test_a_model_cannot_command_the_terminal() -> None:
    texts = StreamTexts(spelled)
    texts.heard(tokens(0, 27, *b"]0;owned", 7, 0x202E, *b"end"))
    (stream,) = texts.open.values()
    said = texts.end_of(stream, 80) + texts.heard(finished(27, *b"[2J", 0x9B, *b"x\ty\n"))
    assert all(c.isprintable() or c in "\n\t" for c in said)
    assert "end" in said


def test_who_is_too_slow_is_told_so_until_it_has_caught_up() -> None:
    texts = StreamTexts()
    texts.heard(Demoted("reader", 5))
    assert "only results" in texts.note
    texts.heard(Restored())
    assert texts.note == ""
    assert "7 streams" in texts.heard(LetGo(7, 70))


def test_the_foot_of_the_terminal_has_a_line_for_each_stream_that_fits() -> None:
    texts = StreamTexts(spelled)
    texts.heard(tokens(0, *b"word " * 100))
    texts.heard(Demoted("socket", 5))
    lines = [str(line) for line in drawn(texts, 60).renderables]
    assert lines[0].startswith("c/1 w0 v3   500 ")
    assert len(lines[0]) <= 60
    assert "1 open streams" in lines[1]


@pytest.mark.parametrize("event", [tokens(0, 1), GapFound(*WHERE, 1, 2), Restored()])
def test_a_line_for_scripts_has_all_fields(event: Tokens | GapFound | Restored) -> None:
    line = as_line(event)
    assert line["event"] in {"tokens", "gap_found", "restored"}
    assert line.keys() - {"event"} == {each.name for each in fields(event)}
