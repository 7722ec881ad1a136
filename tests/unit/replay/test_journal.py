"""A reader gets back what was written, or is told exactly what of it is missing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.files import lock, pack, retain, segments_in
from rolloutbus.replay.journal.format import (
    HEADER_BYTES,
    Found,
    Framer,
    JournalDamaged,
    JournalError,
    Wrong,
    framer_of,
    scan,
)
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import End, Head, Record, Stream, Tap, payload_of
from rolloutbus.replay.journal.writer import recover
from tests.conformance.plain import read, read_all
from tests.unit.replay.segments import Desk, Salts, segment

LAST_BYTES = 64 * 1024
EARLIER = Path(__file__).parent / "golden/seeded"
SMALL = JournalSettings(segment_bytes=600)


def written(directory: Path, n: int = 30, *, packs: bool = False) -> list[Record]:
    """A journal of several segments; its records."""
    desk = Desk(directory, SMALL, packs=packs)
    for i in range(n):
        desk.add(f"client/{i}", topic=bytes([i]) * (i % 7))
        desk.flush()
    desk.close()
    return list(Journal(directory))


def test_what_was_written_is_read_in_order_and_nothing_is_missing(tmp_path: Path) -> None:
    records = written(tmp_path / "j")
    journal = Journal(tmp_path / "j")
    assert [each.seq for each in journal] == list(range(len(records)))
    rids = [each.entries[0].rid for each in records if isinstance(each, Stream)]
    assert rids == [f"client/{i}" for i in range(30)]
    assert journal.is_closed
    assert (journal.torn, journal.damages, journal.lost) == (None, [], [])
    assert len({each.salt for each in records if isinstance(each, Head)}) > 2


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_segment(tmp_path: Path, make: Callable[[Path], None]) -> None:
    written(tmp_path / "j")
    make(tmp_path / "j" / "000099.rbj")
    with pytest.raises(SettingsError, match=r"000099\.rbj is no file"):
        Journal(tmp_path / "j")


def test_packed_segments_hold_the_same_records(tmp_path: Path) -> None:
    records = written(tmp_path / "plain")
    assert written(tmp_path / "packed", packs=True) == records
    assert not list((tmp_path / "packed").glob("*.rbj"))


def test_a_seed_in_a_journal_of_an_earlier_version_is_read() -> None:
    """The file was written when `SamplingParams` was `Sampling`, and its field `seed`."""
    (entry,) = (e for each in Journal(EARLIER) if isinstance(each, Tap) for e in each.entries)
    body = unpack(entry)
    assert isinstance(body, Generate)
    assert body.sampling == SamplingParams(max_new_tokens=8, temperature=0.5, sampling_seed=7)


def test_any_messagepack_reader_can_walk_a_segment(tmp_path: Path) -> None:
    written(tmp_path / "j", 3)
    name, version, salt, *records = read_all((tmp_path / "j" / segment(1)).read_bytes())
    assert (name, version, len(salt)) == ("rolloutbus-journal", 1, 8)
    kinds = [read(each[4:])[0] for each in records]
    assert kinds == ["head", "stream", "stream", "stream", "end"]


def test_cut_at_every_byte_of_the_last_64_kib_it_opens_and_tells_what_is_torn(
    tmp_path: Path,
) -> None:
    random = Random(5)
    desk = Desk(tmp_path / "j")
    for i in range(30):
        desk.add(f"client/{i}", topic=random.randbytes(random.choice((3, 2000, 8000))))
    desk.flush()
    content = (tmp_path / "j" / segment(1)).read_bytes()
    assert len(content) > LAST_BYTES
    framer = framer_of(content)
    assert framer is not None
    whole = [each for each in scan(framer, content) if isinstance(each, Found)]
    # Scanning begins at the last record before the part that is cut: those before it do not change.
    cuts_from = len(content) - LAST_BYTES
    start = max(each.offset for each in whole if each.offset <= cuts_from)
    whole = [each for each in whole if each.offset >= start]
    n_whole = 0
    for cut in range(cuts_from, len(content)):
        while whole[n_whole].end <= cut:
            n_whole += 1
        found = list(scan(framer, content[:cut], start))
        assert found[:n_whole] == whole[:n_whole]
        torn_at = whole[n_whole].offset
        if cut == torn_at:
            assert len(found) == n_whole
            continue
        wrong = found[n_whole]
        assert len(found) == n_whole + 1
        # The length is known once its four bytes, and the checksum's, are there.
        lacks = whole[n_whole].end - cut if cut - torn_at >= 9 else 0
        assert wrong == Wrong(torn_at, cut, is_tail=True, lacks_bytes=lacks)


@pytest.mark.parametrize("at", ["header", "head", "boundary", "length", "payload"])
def test_a_torn_journal_tells_file_offset_and_sizes(tmp_path: Path, at: str) -> None:
    desk = Desk(tmp_path / "j")
    desk.add("client/0", "client/1")
    desk.flush()
    file = tmp_path / "j" / segment(1)
    content = file.read_bytes()
    framer = framer_of(content)
    assert framer is not None
    head, first, second = [each for each in scan(framer, content) if isinstance(each, Found)]
    cut = {
        "header": HEADER_BYTES - 1,
        "head": HEADER_BYTES + 20,
        "boundary": second.offset,
        "length": second.offset + 3,
        "payload": second.end - 4,
    }[at]
    file.write_bytes(content[:cut])

    journal = Journal(tmp_path / "j")
    records = list(journal)

    assert records == [each.record for each in (head, first, second) if each.end <= cut]
    assert not journal.is_closed
    torn_at = max([each.end for each in (head, first, second) if each.end <= cut], default=0)
    if at == "head":
        torn_at = HEADER_BYTES
    if at == "boundary":
        assert journal.torn is None
        return
    assert journal.torn is not None
    file_name, offset, size_bytes, lacks, next_seq = journal.torn
    assert (file_name, offset, size_bytes) == (segment(1), torn_at, cut - torn_at)
    assert lacks == {"payload": 4, "head": head.end - cut}.get(at, 0)
    assert next_seq == len(records)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Whether it is packed -> a journal to make copies of."""
    directory = tmp_path_factory.mktemp("journals")
    for packs in (False, True):
        written(directory / str(packs), 12, packs=packs)
    return {packs: directory / str(packs) for packs in (False, True)}


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), packs=st.booleans())
def test_a_flipped_bit_anywhere_is_found_and_costs_no_record_beside_its_own(
    tmp_path_factory: pytest.TempPathFactory,
    journals: dict[bool, Path],
    place: float,
    bit: int,
    packs: bool,
) -> None:
    directory = tmp_path_factory.mktemp("flip")
    shutil.copytree(journals[packs], directory / "j")
    records = list(Journal(journals[packs]))
    files = sorted((directory / "j").glob("*.rb?"))
    contents = [file.read_bytes() for file in files]
    offset = int(place * sum(map(len, contents)))
    number = 0
    while offset >= len(contents[number]):
        offset -= len(contents[number])
        number += 1
    file, content = files[number], contents[number]
    flipped = bytearray(content)
    flipped[offset] ^= 1 << bit
    file.write_bytes(flipped)

    journal = Journal(directory / "j", skip=True)
    left = list(journal)
    missing = [each for each in records if each not in left]

    assert [each for each in records if each in left] == left
    is_last = file == files[-1]
    if offset < HEADER_BYTES:  # name and salt stand there twice
        assert missing == []
        return
    assert missing
    if journal.torn is not None:
        assert is_last
        assert isinstance(missing[-1], End)
        assert journal.torn.next_seq == missing[0].seq
        return
    # A run that did not get smaller is stored as it is: of it, too, only the one record is lost.
    assert {damage.file for damage in journal.damages} == {file.name}
    told = [
        seq
        for damage in journal.damages
        for seq in range(damage.first_missing, damage.first_missing + damage.n_missing)
    ]
    assert [each.seq for each in missing] == told
    with pytest.raises(JournalDamaged):
        list(Journal(directory / "j"))


def test_a_record_that_a_peer_wrote_into_its_message_is_never_taken_for_one(
    tmp_path: Path,
) -> None:
    other = Desk(tmp_path / "other", salts=Salts(100))
    other.add("forged/1")
    other.flush()
    forged = (tmp_path / "other" / segment(1)).read_bytes()[HEADER_BYTES:]
    desk = Desk(tmp_path / "j")
    desk.add("client/1", topic=forged)
    desk.flush()
    desk.add("client/2")
    desk.flush()
    file = tmp_path / "j" / segment(1)
    content = bytearray(file.read_bytes())
    content[content.index(forged) - 1] ^= 1
    file.write_bytes(content)

    journal = Journal(tmp_path / "j", skip=True)

    rids = [each.entries[0].rid for each in journal if isinstance(each, Stream)]
    assert rids == ["client/2"]
    assert [each.n_missing for each in journal.damages] == [1]


def test_a_segment_that_is_not_there_is_told_with_the_numbers_of_its_records(
    tmp_path: Path,
) -> None:
    records = written(tmp_path / "j")
    (tmp_path / "j" / segment(2)).unlink()
    with pytest.raises(JournalDamaged, match=r"000003\.rbj.*a segment before it is not there"):
        list(Journal(tmp_path / "j"))
    journal = Journal(tmp_path / "j", skip=True)
    left = {each.seq for each in journal}
    (damage,) = journal.damages
    missing = set(range(damage.first_missing, damage.first_missing + damage.n_missing))
    assert left | missing == {each.seq for each in records}
    assert not left & missing


def test_segments_that_retention_has_deleted_are_no_damage_and_others_are(
    tmp_path: Path,
) -> None:
    records = written(tmp_path / "j", packs=True)
    n_gone = retain(tmp_path / "j", keep_bytes=900, oldest_s=0.0)
    assert n_gone > 1
    journal = Journal(tmp_path / "j")
    left = list(journal)
    assert left == records[journal.first_seq :]
    assert 0 < journal.first_seq == left[0].seq
    assert journal.gaps == []
    (tmp_path / "j" / segment(n_gone + 1, is_packed=True)).unlink()
    with pytest.raises(JournalDamaged, match=f"records {journal.first_seq} to "):
        list(Journal(tmp_path / "j"))


def test_a_first_segment_that_retention_did_not_delete_is_told(tmp_path: Path) -> None:
    written(tmp_path / "j")
    (tmp_path / "j" / segment(1)).unlink()
    with pytest.raises(JournalDamaged, match=r"a segment before it is not there; records 0 to "):
        list(Journal(tmp_path / "j"))
    journal = Journal(tmp_path / "j", skip=True)
    left = list(journal)
    (damage,) = journal.damages
    assert (damage.first_missing, damage.n_missing) == (0, left[0].seq)
    assert [each.kind for each in journal.gaps] == ["damage"]


@pytest.mark.parametrize("packs", [False, True])
def test_wherever_a_journal_is_cut_its_reader_says_so(
    tmp_path: Path, rng: Random, *, packs: bool
) -> None:
    records = written(tmp_path / "whole", packs=packs)
    whole = Journal(tmp_path / "whole")
    assert list(whole) == records
    assert whole.gaps == []
    for number, file in enumerate(segments_in(tmp_path / "whole"), start=1):
        content = file.path.read_bytes()
        framer = framer_of(content)
        assert framer is not None
        ends = [each.end for each in scan(framer, content) if isinstance(each, Found)]
        for cut in {0, HEADER_BYTES, *ends[:-1], rng.randrange(1, len(content))}:
            directory = tmp_path / f"{number}-{cut}"
            shutil.copytree(tmp_path / "whole", directory)
            (directory / file.path.name).write_bytes(content[:cut])
            journal = Journal(directory, skip=True)
            assert len(list(journal)) < len(records)
            is_tail = not packs and number == len(segments_in(directory))
            kinds = {each.kind for each in journal.gaps}
            assert kinds == {"tail" if is_tail else "damage"}, journal.gaps
            if not is_tail:
                with pytest.raises(JournalDamaged):
                    list(Journal(directory))


@pytest.mark.parametrize("has_index", [True, False])
def test_a_packed_run_that_is_cut_in_half_has_cost_all_its_records(
    tmp_path: Path, rng: Random, *, has_index: bool
) -> None:
    desk = Desk(tmp_path, packs=True)
    desk.add(*(f"client/{i}" for i in range(162)))
    desk.close()
    assert [each.seq for each in Journal(tmp_path)] == list(range(164))
    ((_, file),) = segments_in(tmp_path)
    content = file.read_bytes()
    framer = framer_of(content)
    assert framer is not None
    _, run, _ = [each for each in scan(framer, content) if isinstance(each, Found)]
    file.write_bytes(content[: rng.randrange(run.offset, run.end)])
    if not has_index:
        file.with_suffix(".idx").unlink()

    journal = Journal(tmp_path, skip=True)
    left = [each.seq for each in journal]  # as it is compressed it may show some in the clear
    *_, damage = journal.damages
    told = [
        seq
        for each in journal.damages
        for seq in range(each.first_missing, each.first_missing + each.n_missing)
    ]
    if has_index:
        assert sorted(left + told) == list(range(164))
        assert damage.sentence.endswith(f"; records {damage.first_missing} to 163 are missing")
    else:
        assert f"record {left[-1] + 1} and those that followed are missing" in damage.sentence
        assert "how many they were is not known" in damage.sentence


def test_last_segments_that_are_gone_are_told(tmp_path: Path) -> None:
    written(tmp_path / "j")
    files = segments_in(tmp_path / "j")
    files[-1].path.unlink()
    journal = Journal(tmp_path / "j")
    assert list(journal)
    (gap,) = journal.gaps
    assert gap.kind == "tail"
    assert f"{files[-2].path.name} says that another segment follows" in gap.sentence


def test_a_journal_that_is_being_written_has_no_end_yet(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "j")
    desk.add("client/0")
    desk.flush()
    writer = lock(tmp_path / "j")
    journal = Journal(tmp_path / "j")
    assert list(journal)
    assert (journal.is_being_written, journal.gaps) == (True, [])
    os.close(writer)
    assert list(journal)
    (gap,) = journal.gaps
    assert (gap.kind, "000001.rbj has no end" in gap.sentence) == ("tail", True)


@pytest.mark.parametrize("cut", [HEADER_BYTES, -40])
def test_a_segment_of_gibibytes_of_nothing_is_no_memory_error(tmp_path: Path, cut: int) -> None:
    written(tmp_path / "j")
    file = tmp_path / "j" / segment(2)
    file.write_bytes(file.read_bytes()[:cut])
    os.truncate(file, 8 * 2**30)
    journal = Journal(tmp_path / "j", skip=True)
    assert list(journal)
    assert [each.file for each in journal.damages] == [file.name]
    for last in segments_in(tmp_path / "j")[2:]:
        last.path.unlink()
    assert list(journal)
    assert journal.torn is not None
    if cut == HEADER_BYTES:
        with pytest.raises(JournalError, match="its beginning is damaged"):
            recover(tmp_path / "j", 10**18)
        return
    assert recover(tmp_path / "j", 10**18).next_segment == 3
    assert file.stat().st_size < 10_000


@pytest.mark.parametrize("size_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + 9])
def test_a_last_segment_that_was_only_just_begun_is_a_torn_tail(
    tmp_path: Path, size_bytes: int
) -> None:
    records = written(tmp_path / "j")
    last = max((tmp_path / "j").iterdir())
    last.write_bytes(last.read_bytes()[:size_bytes])

    journal = Journal(tmp_path / "j")
    left = list(journal)

    assert left == records[: len(left)]
    assert isinstance(left[-1], End)
    assert not journal.is_closed
    if size_bytes != HEADER_BYTES:
        assert journal.torn is not None
        assert journal.torn.next_seq == len(left)


def test_segments_that_are_packed_while_they_are_read_are_no_damage(
    tmp_path: Path,
) -> None:
    records = written(tmp_path / "j")
    reading = iter(Journal(tmp_path / "j"))
    left = [next(reading)]
    for number in (2, 3):
        pack(tmp_path / "j", number)
    assert [*left, *reading] == records


def test_a_later_format_is_refused_and_an_empty_directory_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        Journal(tmp_path)
    desk = Desk(tmp_path / "j", salts=Salts())
    desk.flush()
    file = tmp_path / "j" / segment(1)
    framer = Framer(Salts()(8))
    head = Head(0, 1, "j", 1, 2, framer.salt, 3)
    file.write_bytes(framer.header + framer.frame(payload_of(head)))
    with pytest.raises(JournalError, match="format 2"):
        list(Journal(tmp_path / "j"))
