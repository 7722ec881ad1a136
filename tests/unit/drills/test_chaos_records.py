"""A history on disk is what was seen."""

from collections.abc import Sequence
from pathlib import Path

from tests.drills.chaos.records import (
    Ended,
    HistoryWriter,
    Invoked,
    Offered,
    Progressed,
    Record,
    Settled,
    WeightRecord,
    read_history,
    read_publications,
)


def test_history_reads_back_and_survives_a_torn_last_line(tmp_path: Path) -> None:
    records = [
        Invoked("c:0:1", 1.5, b"\x01\x00\x00\x00", 7, 2, ["cancelled"], is_streamed=True),
        Progressed("c:0:1", 1.6, "w1", 2),
        Ended("c:0:1", 1.7, "ok", "c/1", tokens=b"\x00\xff\x80\x01" * 2, versions=[(3, 2)]),
    ]
    path = tmp_path / "history.jsonl"
    _write(path, records)
    assert list(read_history(path)) == records


def test_publications_read_back_and_survive_a_torn_last_line(tmp_path: Path) -> None:
    records = [Offered(3, 1.5), Settled(3, 2.5, "committed"), Offered(4, 3.5)]
    path = tmp_path / "trainer.jsonl"
    _write(path, records)
    assert list(read_publications(path)) == records


def test_nothing_that_a_writer_was_told_waits_in_its_memory(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        history.add(Offered(1, 0.5))
        assert list(read_publications(tmp_path / "history.jsonl")) == [Offered(1, 0.5)]


def _write(path: Path, records: Sequence[Record | WeightRecord]) -> None:
    with HistoryWriter(path) as history:
        for record in records:
            history.add(record)
    with path.open("ab") as file:
        file.write(b'{"type":"ended","op"')
