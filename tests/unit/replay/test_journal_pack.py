"""A run unpacks to what it says, or is refused before memory is taken for it."""

from pathlib import Path

import pytest
import zstandard

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.replay.journal.files import pack
from rolloutbus.replay.journal.format import Framer, JournalError
from rolloutbus.replay.journal.pack import unpacked
from rolloutbus.replay.journal.records import Packed, Stream, payload_of
from tests.unit.replay.segments import Desk, segment

FRAMER = Framer(b"12345678")


def framed(*seqs: int) -> bytes:
    return b"".join(FRAMER.frame(payload_of(Stream(seq, 1, b"t", []))) for seq in seqs)


def run(content: bytes, n_records: int, size_bytes: int) -> Packed:
    return Packed(5, 1, n_records, size_bytes, zstandard.ZstdCompressor().compress(content))


def test_a_run_gives_its_records_back() -> None:
    content = framed(5, 6)
    found = unpacked(FRAMER, run(content, 2, len(content)))
    assert [each.record.seq for each in found] == [5, 6]


def test_a_run_that_would_become_more_than_it_says_is_refused_unread() -> None:
    bomb = run(bytes(1 << 26), 1, 1000)
    assert len(bomb.content) < 10_000
    with pytest.raises(RemoteProtocolError, match="something else"):
        unpacked(FRAMER, bomb)


@pytest.mark.parametrize("n_records", [1, 3])
def test_a_run_of_another_number_of_records_is_refused(n_records: int) -> None:
    content = framed(5, 6)
    with pytest.raises(RemoteProtocolError, match="something else"):
        unpacked(FRAMER, run(content, n_records, len(content)))


def test_what_is_no_zstd_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be unpacked"):
        unpacked(FRAMER, Packed(5, 1, 1, 10, b"not compressed"))


def test_a_damaged_segment_is_not_packed_and_stays_as_it_is(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.add("c/0", "c/1")
    desk.close()
    file = tmp_path / segment(1)
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        pack(tmp_path, 1)
    assert [each.name for each in tmp_path.iterdir()] == [segment(1)]
    assert file.read_bytes() == content
