"""A replay takes as long as the recording did, and skips the time in which nobody recorded."""

from rolloutbus.replay.journal.records import End, Head, Record
from rolloutbus.replay.player_core import Pace
from tests.unit.replay.streams import MS, row, stream

ROW = row("c/1", (1, 1), 0, 5)


def head(seq: int, at_ms: int) -> Head:
    return Head(seq, at_ms * MS, "j", 1, 1, bytes(8), 0)


def times(*records: Record) -> list[float]:
    pace = Pace()
    return [round(1000 * pace.at_s(each), 6) for each in records]


def test_time_counts_from_the_first_record_on() -> None:
    assert times(head(0, 500), stream(1, ROW, at_ms=700), stream(2, ROW, at_ms=701)) == [
        0,
        200,
        201,
    ]


def test_a_rotated_segment_changes_nothing() -> None:
    records = [
        head(0, 100),
        End(1, 300 * MS, "rotated", 1),
        head(2, 300),
        stream(3, ROW, at_ms=450),
    ]
    assert times(*records) == [0, 200, 200, 350]


def test_the_time_between_two_recordings_is_not_waited_for() -> None:
    records = [
        head(0, 100),
        End(1, 300 * MS, "closed", 1),
        head(2, 9_000),
        stream(3, ROW, at_ms=9_050),
    ]
    assert times(*records) == [0, 200, 200, 250]


def test_a_clock_that_began_again_does_not_run_backwards() -> None:
    assert times(head(0, 9_000), stream(1, ROW, at_ms=10), stream(2, ROW, at_ms=30)) == [0, 0, 20]
