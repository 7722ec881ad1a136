"""A timeline shows what a journal says, and says what it does not know."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.drawing.colours import VERSIONS, ink_on
from rolloutbus.bus.wire.messages.membership import Members
from rolloutbus.replay.journal.records import Record, Stream, Tap, ToldRecord
from rolloutbus.replay.timeline.browser import page_of, trace_of
from rolloutbus.replay.timeline.lanes import Execution, LaneSpan, Timeline, clipped
from rolloutbus.replay.timeline.picture import draw
from rolloutbus.replay.timeline.timeline import timeline_of
from tests.unit.replay.timeline_story import GOLDEN, Tape, golden_files, members, story


def executions(timeline: Timeline) -> dict[tuple[str, int], Execution]:
    """By rid and number of the attempt."""
    return {(e.rid, e.attempt[1]): e for lane in timeline.lanes for e in lane.executions}


def kinds(spans: Iterable[LaneSpan]) -> list[str]:
    return [each.kind for each in spans]


def without(records: Iterable[Record], *kinds_of: type[Record]) -> list[Record]:
    return [each for each in records if not isinstance(each, kinds_of)]


@pytest.mark.parametrize("name", ["timeline.json", "timeline.trace.json"])
def test_the_story_gives_the_data_that_was_looked_at(name: str) -> None:
    # After a change that is meant: python -m tests.unit.replay.timeline_story, and read the diff.
    assert golden_files(story())[name] == (GOLDEN / name).read_bytes()


def test_prefill_ends_with_the_first_token_and_each_version_has_a_part() -> None:
    spans = executions(timeline_of(story()))["c/1", 1].spans
    assert [(s.kind, s.version, s.start_s, s.end_s) for s in spans] == [
        ("prefill", -1, 0.115, 0.2),
        ("decode", 0, 0.2, 0.3),
        ("decode", 1, 0.3, 0.7),
    ]


def test_sessions_that_got_another_worker_are_shown() -> None:
    (move,) = timeline_of(story()).moves
    assert (move.kind, move.start_s, move.note) == ("moved", 2.505, "s: w0 -> w1 (lost)")


def test_what_came_in_one_portion_begins_where_its_worker_says() -> None:
    spans = executions(timeline_of(story()))["c/2", 2].spans
    # It ended at 1.0 and took 0.74 s from its first token on: at 0.26 that one was sampled.
    assert kinds(spans) == ["prefill", "decode", "decode"]
    assert [round(each.start_s, 6) for each in spans] == [
        0.16,
        0.26,
        round(0.26 + 0.64 * 8 / 12, 6),
    ]
    assert [each.n_tokens for each in spans[1:]] == [8, 5]


def test_a_portion_without_a_result_is_not_split_by_guess() -> None:
    tape = Tape()
    asked = tape.asked(10, "c/1", stream=False)
    tape.given(20, "w0", asked, (1, 1))
    tape.accepted(30, "w0", "c/1", (1, 1))
    tape.row(500, "w0", ("c/1", (1, 1)), 32)
    tape.row(900, "w0", ("c/1", (1, 1)), 32)
    found = timeline_of(tape.records)
    spans = executions(found)["c/1", 1].spans
    assert [(s.kind, s.start_s, s.end_s) for s in spans] == [
        ("unsplit", 0.03, 0.5),
        ("decode", 0.5, 0.9),
    ]
    assert "Prefill and decode cannot be told apart in 1 executions." in found.notes


def test_the_stall_is_as_long_as_the_worker_measured() -> None:
    w0, w1 = timeline_of(story()).lanes
    stall = next(each for each in w0.weights if each.kind == "stall")
    assert round(stall.end_s - stall.start_s, 6) == 0.0125
    assert kinds(w1.weights) == ["pull", "commit"]  # its commit failed: nothing is known of a stall
    assert w1.weights[-1].note.endswith("failed")


def test_a_version_begins_with_its_commit_and_not_with_the_next_heartbeat() -> None:
    w0, _ = timeline_of(story()).lanes
    assert [(v.version, v.start_s) for v in w0.versions[:2]] == [(0, 0.01), (1, 0.5)]


def test_a_dead_worker_is_gone_since_it_was_last_heard_and_its_work_is_lost_when_that_is_said() -> (
    None
):
    found = timeline_of(story())
    (gone,) = (each for each in found.lanes[0].states if each.kind == "gone")
    assert (gone.start_s, gone.end_s) == (1.6, 2.801)
    lost = executions(found)["c/5", 3]
    assert (lost.outcome, lost.note, lost.end_s) == ("lost", "lease expired", 2.5)
    assert kinds(lost.spans) == ["prefill", "decode", "lost"]
    resumed = executions(found)["c/5", 6]
    assert (resumed.outcome, resumed.n_resumed, resumed.n_tokens) == ("finished", 1, 2)


def test_what_a_worker_never_accepted_ends_when_it_is_given_to_another() -> None:
    found = executions(timeline_of(story()))
    assert (found["c/6", 4].outcome, found["c/6", 4].end_s) == ("lost", 2.51)


def test_pauses_are_as_long_as_their_commands_say() -> None:
    _, w1 = timeline_of(story()).lanes
    assert [(s.kind, s.start_s, s.end_s) for s in w1.states] == [
        ("paused", 1.11, 1.31),
        ("asleep", 4.4, 4.5),
    ]


def test_nothing_is_drawn_through_the_time_in_which_nobody_recorded() -> None:
    found = timeline_of(story())
    (gap,) = found.unrecorded
    assert (gap.start_s, gap.end_s) == (3.3, 4.3)
    spans = [
        span
        for lane in found.lanes
        for spans in (lane.versions, lane.states, *(e.spans for e in lane.executions))
        for span in spans
    ]
    assert not [each for each in spans if each.start_s < gap.end_s and each.end_s > gap.start_s]


def test_a_recording_without_a_tap_shows_its_streams_and_says_what_is_missing() -> None:
    found = timeline_of(without(story(), Tap))
    assert {kind for e in executions(found).values() for kind in kinds(e.spans)} == {"decode"}
    assert any("without the router's tap" in note for note in found.notes)
    assert executions(found)["c/1", 1].outcome == "finished"
    assert [span.kind for span in found.lanes[0].states] == ["gone"]


def test_rows_that_overtake_the_tap_change_nothing_but_the_order() -> None:
    tape = Tape()
    tape.row(10, "w0", ("c/1", (1, 1)))
    asked = tape.asked(20, "c/1")
    tape.given(20, "w0", asked, (1, 1))
    tape.accepted(20, "w0", "c/1", (1, 1))
    tape.row(30, "w0", ("c/1", (1, 1)), finish="length")
    tape.finished(40, "w0", ("c/1", (1, 1)), 20.0)
    (found,) = executions(timeline_of(tape.records)).values()
    assert (found.start_s, found.n_prompt_tokens, found.outcome) == (0.01, 3, "finished")
    assert kinds(found.spans) == ["decode"]


def test_another_process_of_a_name_shows_even_when_the_router_lists_it_at_once() -> None:
    tape = Tape()
    tape.told(0, "members", members_of("w0", "a"))
    tape.heartbeat(100, "w0", 3)
    tape.heartbeat(200, "w0", 3)
    tape.told(400, "members", members_of("w0", "b"))
    tape.heartbeat(450, "w0", 0)
    tape.heartbeat(600, "w0", 0)
    (lane,) = timeline_of(tape.records).lanes
    assert [(s.kind, s.start_s) for s in lane.states] == [("gone", 0.2)]
    assert [v.version for v in lane.versions] == [0, 3, 0]


def members_of(name: str, boot: str) -> msgspec.Struct:
    return Members(members((name, boot, 0)))


def test_garbage_is_counted_and_hides_nothing() -> None:
    records = story()
    for at, record in enumerate(records):
        if isinstance(record, Tap) and record.entries[0].kind == "publish_version":
            entry = msgspec.structs.replace(record.entries[0], body=msgspec.Raw(b"\x80"))
            records[at] = msgspec.structs.replace(record, entries=[entry])
    found = timeline_of(records)
    assert "1 entries could not be read." in found.notes
    assert found.updates == []
    assert len(executions(found)) == len(executions(timeline_of(story())))


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_records_may_be_missing_and_no_two_executions_of_a_row_overlap(random: Any) -> None:  # noqa: ANN401
    records = story()
    kept = [
        each
        for each in records
        if not isinstance(each, Tap | Stream | ToldRecord) or random.random() > 0.3
    ]
    found = timeline_of(kept)
    for lane in found.lanes:
        ends: dict[int, float] = {}
        for each in lane.executions:
            assert each.start_s >= ends.get(each.row, 0.0)
            ends[each.row] = each.end_s
            assert each.start_s <= each.end_s <= found.duration_s
            for before, after in zip(each.spans, each.spans[1:], strict=False):
                assert before.end_s <= after.start_s + 1e-9
    trace_of(found)
    page_of(found)


def test_a_part_keeps_what_lies_between_its_ends() -> None:
    part = clipped(timeline_of(story()), 1.0, 2.0)
    assert part.began_at == 1_700_000_001.0
    assert part.duration_s == 1.0
    assert {key[0] for key in executions(part)} == {"c/5", "c/6"}
    assert all(0 <= s.start_s <= s.end_s <= 1 for e in executions(part).values() for s in e.spans)
    assert len(part.waiting) == len(part.lanes[0].tokens_per_s) == 21


def test_slices_of_one_thread_of_a_trace_are_nested() -> None:
    trace = json.loads(trace_of(timeline_of(story())))
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert len(slices) > 8
    for found in slices.values():
        for start, end in found:
            assert not [s for s, e in found if start < s < end < e]


def test_pictures_of_both_kinds_are_written(tmp_path: Any) -> None:  # noqa: ANN401
    found = timeline_of(story())
    draw(found, tmp_path / "t.png", title="a story")
    draw(found, tmp_path / "t.svg")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "t.svg").read_bytes()


def test_an_empty_recording_is_an_empty_timeline(tmp_path: Any) -> None:  # noqa: ANN401
    found = timeline_of(Tape().records)
    assert (found.lanes, found.duration_s) == ([], 0.0)
    draw(found, tmp_path / "t.png")
    page_of(found)


def test_text_on_every_colour_can_be_read() -> None:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in VERSIONS:
        pair = sorted([light(colour), light(ink_on(colour))])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 3.0, colour


def test_following_versions_differ_for_those_who_do_not_see_red_and_green() -> None:
    def as_seen(colour: str) -> tuple[float, float]:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.5 * (red + green), blue  # what is left without the difference of the two

    for one, other in zip(VERSIONS, [*VERSIONS[1:], VERSIONS[0]], strict=True):
        (a, b), (c, d) = as_seen(one), as_seen(other)
        assert abs(a - c) + abs(b - d) > 80, (one, other)
