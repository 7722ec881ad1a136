"""The writer that comes next cuts what is torn, says so, and goes on with the next number."""

from pathlib import Path
from random import Random

import pytest

from rolloutbus.replay.journal.files import pack, segments_in
from rolloutbus.replay.journal.format import HEADER_BYTES, Found, JournalError, framer_of, scan
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import End
from rolloutbus.replay.journal.writer import Recovered, recover
from tests.unit.replay.segments import Desk, segment

NOW_NS = 7 * 10**9
LAST_BYTES = 64 * 1024
STRIDE = 331


def torn(directory: Path, n_cut: int) -> Path:
    """A journal of head and two records, less its last bytes; the file."""
    desk = Desk(directory)
    desk.add("c/0", "c/1")
    desk.flush()
    file = directory / segment(1)
    file.write_bytes(file.read_bytes()[:-n_cut])
    return file


def test_a_torn_tail_is_cut_and_the_end_says_how_much(tmp_path: Path) -> None:
    file = torn(tmp_path, 5)
    size_bytes = file.stat().st_size

    found = recover(tmp_path, NOW_NS)

    *_, end = list(Journal(tmp_path))
    assert end == End(2, NOW_NS, "recovered", 2, found.cut_bytes)
    assert 0 < found.cut_bytes < size_bytes
    assert found == Recovered(3, 2, "j" * 32, found.cut_bytes, (1,))
    assert recover(tmp_path, NOW_NS) == Recovered(3, 2, "j" * 32, 0, (1,))


def test_wherever_a_writer_died_the_next_one_goes_on_and_all_that_was_whole_is_there(
    tmp_path: Path,
) -> None:
    random = Random(9)
    desk = Desk(tmp_path / "j")
    for i in range(40):
        desk.add(f"c/{i}", topic=random.randbytes(random.choice((3, 1500, 6000))))
    desk.flush()
    content = (tmp_path / "j" / segment(1)).read_bytes()
    framer = framer_of(content)
    assert framer is not None
    ends = [each.end for each in scan(framer, content) if isinstance(each, Found)]
    # Of the offsets that a scan is tried at one by one (test_journal), some with real files.
    cuts = range(len(content) - LAST_BYTES + random.randrange(STRIDE), len(content), STRIDE)
    for number, cut in enumerate(cuts):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / segment(1)).write_bytes(content[:cut])
        n_whole = sum(end <= cut for end in ends)
        cut_bytes = cut - ends[n_whole - 1]

        before = Journal(directory)
        assert len(list(before)) == n_whole
        told = before.torn
        assert (told is None) == (cut_bytes == 0)
        if told is not None:
            where = (told.offset, told.size_bytes, told.next_seq)
            assert where == (cut - cut_bytes, cut_bytes, n_whole)
        assert recover(directory, NOW_NS).cut_bytes == cut_bytes
        after = Journal(directory)
        *kept, end = list(after)
        assert end == End(n_whole, NOW_NS, "recovered", n_whole, cut_bytes)
        assert [each.seq for each in kept] == list(range(n_whole))
        assert (after.torn, after.damages) == (None, [])


@pytest.mark.parametrize("size_bytes", [0, 7, HEADER_BYTES, HEADER_BYTES + 11])
def test_a_segment_that_was_not_begun_is_begun_again(tmp_path: Path, size_bytes: int) -> None:
    file = torn(tmp_path, 5)
    file.write_bytes(file.read_bytes()[:size_bytes])
    assert recover(tmp_path, NOW_NS) == Recovered(0, 1, "", size_bytes, ())
    assert segments_in(tmp_path) == []


def test_what_was_left_of_packing_is_tidied(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.add("c/0")
    desk.close()
    file = tmp_path / segment(1)
    plain = file.read_bytes()
    pack(tmp_path, 1)
    file.write_bytes(plain)  # it died before it could delete that
    (tmp_path / "000001.idx.tmp").write_bytes(b"half")

    assert recover(tmp_path, NOW_NS) == Recovered(3, 2, "j" * 32, 0, ())
    assert {each.name for each in tmp_path.iterdir()} == {"000001.rbz", "000001.idx"}


def test_damage_before_the_tail_is_left_for_people_to_see(tmp_path: Path) -> None:
    file = torn(tmp_path, 5)
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 20] ^= 1
    file.write_bytes(content)
    assert recover(tmp_path, NOW_NS).next_seq == 3
    journal = Journal(tmp_path, skip=True)
    assert [each.seq for each in journal] == [1, 2]
    assert [each.offset for each in journal.damages] == [HEADER_BYTES]


def test_a_last_segment_that_is_none_is_not_written_over(tmp_path: Path) -> None:
    torn(tmp_path, 5).write_bytes(bytes(10_000))
    with pytest.raises(JournalError, match="its beginning is damaged"):
        recover(tmp_path, NOW_NS)
    assert (tmp_path / segment(1)).stat().st_size == 10_000
