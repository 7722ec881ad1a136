import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.trainer_adapter.store.ledger import Ledger, LedgerUnsure
from rolloutbus.trainer_adapter.store.versions import (
    Assigned,
    CommitRecord,
    Opened,
    Record,
    Retired,
    Sealed,
)

RECORDS: list[Record] = [
    Opened("0123456789abcdef"),
    Assigned("default", 1),
    Sealed("default", 1, "segment", [Tensor("wé\n", "F32", (2,), 0, 8, 2**64 - 1)]),
    CommitRecord("default", 1),
    Retired("default", 1),
]


def _write(path: Path, records: list[Record]) -> bytes:
    ledger = Ledger(path)
    for record in records:
        ledger.append(record)
    ledger.close()
    return path.read_bytes()


def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "store" / "ledger"
    _write(path, RECORDS[:2])
    _write(path, RECORDS[2:])
    ledger = Ledger(path)
    assert [*ledger.read()] == RECORDS
    ledger.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_tail_torn_at_any_byte_never_happened_and_is_written_over(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole", RECORDS)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for n_bytes in range(len(whole) + 1):
        path = tmp_path / f"torn{n_bytes}"
        path.write_bytes(whole[:n_bytes])
        n_whole = sum(end <= n_bytes for end in ends)
        ledger = Ledger(path)
        assert [*ledger.read()] == RECORDS[:n_whole]
        ledger.append(Assigned("other", 9))
        ledger.close()
        again = Ledger(path)
        assert [*again.read()] == [*RECORDS[:n_whole], Assigned("other", 9)]
        again.close()


def test_damage_before_the_tail_refuses_to_open(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    content = bytearray(_write(path, RECORDS))
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="line 1"):
        Ledger(path)


def test_a_rewritten_ledger_holds_only_the_new_records_and_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(RECORDS[0])
    ledger.rewrite(RECORDS[1:3])
    ledger.append(RECORDS[3])
    ledger.close()
    again = Ledger(tmp_path / "ledger")
    assert [*again.read()] == RECORDS[1:4]
    again.close()


def test_a_ledger_whose_new_name_may_not_be_durable_says_so_and_writes_to_no_lost_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(*RECORDS)
    monkeypatch.setattr(f"{Ledger.__module__}.sync_directory", broken_disk)
    with pytest.raises(LedgerUnsure, match="Input/output error"):
        ledger.rewrite(RECORDS[:1])
    ledger.append(RECORDS[1])
    ledger.close()
    monkeypatch.undo()
    again = Ledger(tmp_path / "ledger")
    assert [*again.read()] == RECORDS[:2]
    again.close()


def broken_disk(_: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_two_stores_cannot_share_a_directory(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "ledger")
    with pytest.raises(SettingsError, match="another weight store"):
        Ledger(tmp_path / "ledger")
    first.close()
    Ledger(tmp_path / "ledger").close()


def test_an_append_that_fails_leaves_nothing_and_room_that_was_taken_is_there(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.append(*RECORDS[:2])
    size_bytes = path.stat().st_size
    with full_disk(size_bytes + 10):
        with pytest.raises(OSError, match="File too large"):
            ledger.make_room(1000)
        with pytest.raises(OSError, match="File too large"):
            ledger.append(RECORDS[2])  # ten bytes of it were written
    ledger.close()
    ledger = Ledger(path)
    assert [*ledger.read()] == RECORDS[:2]
    ledger.make_room(1000)
    with full_disk(path.stat().st_size):
        ledger.append(RECORDS[2])
        with pytest.raises(OSError, match="File too large"):
            ledger.rewrite(RECORDS * 10_000)
        ledger.append(*RECORDS[3:])
    ledger.close()
    ledger = Ledger(path)
    assert [*ledger.read()] == RECORDS
    ledger.rewrite(RECORDS[:1])
    ledger.append(RECORDS[1])
    ledger.close()
    assert [*Ledger(path).read()] == RECORDS[:2]
