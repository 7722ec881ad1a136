"""Files are read without our types, and what is not whole is said."""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rolloutbus.bus.wire.codec import SIGNATURE, encode_batch
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.cli.app import app
from rolloutbus.replay.inspection import inspect
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.records import Stream
from rolloutbus.router.health.dead_letters import DeadLetter, append_letters
from tests.unit.replay.segments import Desk

BODY = msgspec.Raw(msgspec.msgpack.encode({"prompt": b"\x01" * 40, "score": float("nan")}))
LETTER = DeadLetter("a/1", "a", "it died", BODY)


def journal(directory: Path, *, packs: bool) -> list[Path]:
    desk = Desk(directory, packs=packs)
    desk.add("a/1", "a/2", "a/3")
    desk.flush()
    desk.close()
    return sorted(directory.glob("*.rb?"))


def rids_in(records: list[Any]) -> list[str]:
    return [entry[1] for record in records if record[0] == "stream" for entry in record[4]]


@pytest.mark.parametrize("packs", [False, True])
def test_a_segment_is_its_records_packed_or_not(tmp_path: Path, *, packs: bool) -> None:
    (file,) = journal(tmp_path / "j", packs=packs)
    assert file.suffix == (".rbz" if packs else ".rbj")
    records = list(inspect(file))
    assert [record[0] for record in records] == ["head", "stream", "stream", "stream", "end"]
    assert rids_in(records) == ["a/1", "a/2", "a/3"]


def test_records_of_kinds_that_nobody_knows_are_shown(tmp_path: Path) -> None:
    class Novel(Stream, frozen=True, array_like=True, tag="novel"):
        pass

    desk = Desk(tmp_path / "j")
    desk.append(Novel, b"topic", [])
    desk.close()
    (file,) = (tmp_path / "j").glob("*.rbj")
    assert [record[0] for record in inspect(file)] == ["head", "novel", "end"]


def test_dead_letters_are_maps_with_what_bytes_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "letters"
    append_letters(file, [LETTER, LETTER])
    first, second = inspect(file)
    assert first == second
    assert (first["rid"], first["reason"]) == ("a/1", "it died")
    assert first["body"] == {"prompt": {"bytes": 40, "hex": "01" * 32}, "score": "nan"}
    assert next(inspect(file, shows_all=True))["body"]["prompt"]["hex"] == "01" * 40


def test_a_frame_is_its_entries(tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(encode_batch([Entry("status", "a/1"), Entry("abort", "a/2")]))
    assert [entry[:2] for entry in inspect(file)] == [["status", "a/1"], ["abort", "a/2"]]


@pytest.mark.parametrize("start", [b"", SIGNATURE + b"\x91"])
def test_keys_of_maps_that_no_dict_has_are_shown(tmp_path: Path, start: bytes) -> None:
    file = tmp_path / "odd"
    file.write_bytes(start + b"\x82\x91\x01\x02\x81\x03\x04\xa1a")  # {[1]: 2, {3: 4}: "a"}
    assert list(inspect(file)) == [{"[1]": 2, "{'3': 4}": "a"}]


@pytest.mark.parametrize("what", ["segment", "packed", "letters", "frame"])
def test_what_was_cut_is_said_after_all_that_is_whole(tmp_path: Path, what: str) -> None:
    file = tmp_path / "cut"
    if what in ("segment", "packed"):
        (whole,) = journal(tmp_path / "j", packs=what == "packed")
        file.write_bytes(whole.read_bytes()[:-3])
    elif what == "letters":
        append_letters(file, [LETTER, LETTER])
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.write_bytes(encode_batch([Entry("status", "a/1")])[:-3])
    values = inspect(file)
    n_whole = {"segment": 4, "packed": 4, "letters": 1, "frame": 0}[what]
    assert len(list(islice(values, n_whole))) == n_whole
    with pytest.raises(JournalError, match="offset"):
        next(values)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    (file,) = journal(tmp_path / "j", packs=False)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(JournalError, match="no whole record"):
        list(inspect(file))


@pytest.mark.parametrize("content", [b'{"a": 1}', b"\xc1", b"RB\x01", b"RB\x01\x01"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(JournalError):
        list(inspect(file))


def test_what_holds_nothing_or_has_no_end_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(8 << 30)
    for path, status, sentence in (
        (tmp_path / "empty", 1, "it is empty"),
        (Path("/dev/zero"), 1, "it is no regular file"),
        (tmp_path / "pipe", 1, "it is no regular file"),
        (sparse, 1, "neither a frame, a segment nor maps: the last 8589934592 bytes"),
        (tmp_path / "nothing", 1, "No such file or directory"),
        (tmp_path, 2, "is a directory: name one of its files"),
    ):
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert (result.exit_code, result.stdout) == (status, "")
        assert result.stderr.startswith(f"error: {path}")
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1
