"""A history on disk is what was seen."""

from pathlib import Path

from drills.chaos.records import Ended, HistoryWriter, Invoked, Progressed, read_history


def test_history_reads_back_and_survives_a_torn_last_line(tmp_path: Path) -> None:
    records = [
        Invoked("c:0:1", 1.5, b"\x01\x00\x00\x00", 7, 2, ["cancelled"], is_streamed=True),
        Progressed("c:0:1", 1.6, "w1", 2),
        Ended("c:0:1", 1.7, "ok", "c/1", tokens=b"\x00\xff\x80\x01" * 2, versions=[(3, 2)]),
    ]
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path) as history:
        for record in records:
            history.add(record)
    with path.open("ab") as file:
        file.write(b'{"type":"ended","op"')
    assert list(read_history([path])) == records
