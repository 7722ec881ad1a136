import errno
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.weights.manifest import bytes_of, digest_of, lay_out, total_bytes
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.weights.tensor_files import shard_name
from rolloutbus.bus.wire.messages.weights import Offer
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.ledger import (
    GROWTH_BYTES,
    Ledger,
    LedgerUnsure,
    sync_directory,
)
from rolloutbus.trainer_adapter.store.versions import Assigned, CommitRecord, Retired, Sealed

LAYOUT = lay_out([("a", "F32", (16, 4)), ("b", "BF16", (8,))])
SIZE_BYTES = total_bytes(LAYOUT)


class Host:
    """A machine: its shared memory, its disk, and the stores that ran on it."""

    def __init__(self, root: Path) -> None:
        self.disk = root / "disk"
        self.shm = root / "shm"
        self._root = root
        self.shm.mkdir()
        self.contents = self.start()

    def start(self, directory: str = "store") -> StoreContents:
        """A store starts on what is there."""
        self.contents = StoreContents(self._root / directory, self.shm, str(self.disk))
        return self.contents

    def crash(self) -> None:
        """The store dies; shared memory outlives it."""
        self.contents.leave()

    def reboot(self) -> None:
        """Shared memory is gone, too."""
        self.contents.close()

    def close(self) -> None:
        self.contents.close()

    def publish(self, version: int, seed: int, *, is_on_disk: bool = True) -> Sealed:
        """A version, sealed and committed."""
        contents = self.contents
        segment = contents.pool.take(SIZE_BYTES)
        content = contents.pool.content(segment)
        chance = np.random.default_rng(seed + version)
        content[:SIZE_BYTES] = chance.integers(0, 256, SIZE_BYTES, np.uint8)
        tensors = [
            msgspec.structs.replace(each, digest=digest_of(bytes_of(content, each)))
            for each in LAYOUT
        ]
        contents.pool.freeze(segment)
        if is_on_disk:
            assert contents.files is not None
            contents.files.write(("p", version), tensors, content)
        return self.record(Sealed("p", version, segment, tensors))

    def record(self, sealed: Sealed) -> Sealed:
        self.contents.ledger.append(Assigned("p", sealed.version))
        self.contents.ledger.append(sealed)
        self.contents.ledger.append(CommitRecord("p", sealed.version))
        return sealed

    def held(self) -> list[int]:
        """Versions whose bytes are here, and right."""
        pool = self.contents.pool
        return [
            each.number
            for each in self.contents.table.pullable()
            if first_mismatch(pool.content(each.segment), each.tensors) is None
        ]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def test_a_crashed_store_leaves_its_versions_to_the_next(host: Host, seed: int) -> None:
    host.publish(1, seed)
    host.publish(2, seed, is_on_disk=False)
    host.crash()
    host.start()
    assert host.held() == [1, 2]


def test_what_a_store_that_was_killed_had_not_sealed_is_not_left_in_memory(
    host: Host, seed: int
) -> None:
    sealed = host.publish(1, seed)
    lock = host.shm / f"rolloutbus-{host.contents.pool.owner}.lock"
    unfinished = host.shm / f"rolloutbus-{host.contents.pool.owner}-{'0' * 16}"
    unfinished.touch()
    host.crash()
    host.start()
    assert sorted(host.shm.iterdir()) == sorted([host.shm / sealed.segment, lock])


def test_a_store_on_a_copy_of_a_living_stores_ledger_takes_nothing_from_it(
    host: Host, seed: int, tmp_path: Path
) -> None:
    host.publish(1, seed)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    copied = StoreContents(tmp_path / "copy", host.shm)
    assert (copied.table.pullable(), copied.table.assigned) == ([], {"p": 1})
    copied.close()
    host.crash()
    host.start()
    assert host.held() == [1]


def test_versions_that_share_a_segment_still_share_it(host: Host, seed: int) -> None:
    old = host.publish(1, seed)
    host.record(Sealed("p", 2, old.segment, old.tensors))
    host.crash()
    contents = host.start()
    assert host.held() == [1, 2]
    assert len({each.segment for each in contents.table.pullable()}) == 1


def test_after_a_reboot_the_last_committed_version_comes_back_from_disk(
    host: Host, seed: int
) -> None:
    host.publish(1, seed)
    host.publish(2, seed)
    host.reboot()
    contents = host.start()
    assert host.held() == [2]
    assert contents.table.committed == {"p": 2}
    assert [each.offers for each in contents.table.pullable()] == [[Offer("disk", "p/2")]]
    # Of what cannot be had any more, no files are left behind.
    assert [each.name for each in (host.disk / "p").iterdir()] == ["2"]


def test_damaged_files_are_not_read_back(
    host: Host, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    host.publish(1, seed)
    path = host.disk / "p/1" / shard_name(1)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    host.reboot()
    contents = host.start()
    assert host.held() == []
    assert contents.table.assigned == {"p": 1}
    assert path.exists()
    assert "tensor 'b' is damaged" in capsys.readouterr().err


def test_a_version_for_which_there_is_no_room_now_comes_back_later(
    host: Host, seed: int, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    host.publish(1, seed)
    host.reboot()
    with full_disk(1 << 20):  # enough for a ledger
        contents = host.start()
    assert (host.held(), contents.trouble) == ([], "")
    while not contents.ledger.is_long:
        contents.ledger.append(*[Assigned("q" * 4096, 1)] * 512)
    contents.shorten()
    host.reboot()
    host.start()
    assert host.held() == [1]


def test_a_version_whose_disk_is_not_there_now_comes_back_later(
    host: Host, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host.publish(1, seed)
    host.reboot()
    host.disk.rename(tmp_path / "elsewhere")
    assert host.start().table.pullable() == []
    assert f"in neither {host.disk} nor shared memory" in capsys.readouterr().err
    host.reboot()
    shutil.rmtree(host.disk)
    (tmp_path / "elsewhere").rename(host.disk)
    host.start()
    assert host.held() == [1]


def test_without_files_a_reboot_leaves_only_the_numbers(host: Host, seed: int) -> None:
    host.publish(1, seed, is_on_disk=False)
    host.reboot()
    contents = host.start()
    assert (host.held(), contents.table.assigned) == ([], {"p": 1})


def test_files_of_a_version_that_was_retired_are_deleted(host: Host, seed: int) -> None:
    host.publish(1, seed)
    host.publish(2, seed)
    host.contents.ledger.append(Retired("p", 1))
    host.crash()
    host.start()
    assert [each.name for each in (host.disk / "p").iterdir()] == ["2"]


def test_a_store_that_has_lost_its_ledger_takes_no_number_that_has_files(
    host: Host, seed: int
) -> None:
    host.publish(7, seed)
    host.reboot()
    contents = host.start("elsewhere")
    assert contents.table.assigned == {"p": 7}
    assert (host.disk / "p/7").is_dir()


def test_what_a_crashed_store_was_writing_is_deleted(host: Host, seed: int) -> None:
    host.publish(1, seed)
    unfinished = host.disk / f".{host.contents.pool.owner}-p-2"
    unfinished.mkdir()
    host.crash()
    host.start()
    assert [each.name for each in host.disk.iterdir()] == ["p"]


def test_a_store_that_starts_on_a_full_disk_serves_what_was_and_says_so(
    host: Host,
    seed: int,
    full_disk: Callable[..., AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    host.publish(1, seed)
    host.crash()
    with full_disk():
        contents = host.start()
        assert (host.held(), contents.table.committed) == ([1], {"p": 1})
        assert "File too large" in contents.trouble
        with pytest.raises(OSError, match="File too large"):
            contents.make_room(100)
    assert capsys.readouterr().err.count("cannot be written down, so none is published") == 1

    contents.make_room(100)

    assert contents.trouble == ""
    assert "there is room" in capsys.readouterr().err
    host.publish(2, seed)
    host.crash()
    with full_disk(contents.ledger.path.stat().st_size):
        host.start()  # room for what the next store takes over was taken beforehand
        assert (host.held(), host.contents.trouble) == ([1, 2], "")
        host.crash()
    host.start()
    assert (host.held(), host.contents.table.committed) == ([1, 2], {"p": 2})


def test_a_store_that_ends_before_its_disk_has_room_leaves_all_versions_to_the_next(
    host: Host, seed: int, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    host.publish(1, seed)
    host.publish(2, seed, is_on_disk=False)
    host.crash()
    with full_disk():
        for _ in range(2):
            assert host.start().trouble
            host.crash()
    host.start()
    assert (host.held(), host.contents.trouble) == ([1, 2], "")
    assert len([*host.shm.iterdir()]) == 3  # two segments, one lock


def test_a_store_does_not_start_on_a_ledger_that_a_power_cut_might_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    StoreContents(tmp_path, tmp_path / "shm").close()
    n_synced = 0

    def sync(directory: Path) -> None:
        nonlocal n_synced
        n_synced += 1
        if n_synced > 1:  # the first is before the takeover is written down
            raise OSError(errno.EIO, "Input/output error")
        sync_directory(directory)

    monkeypatch.setattr(f"{Ledger.__module__}.sync_directory", sync)
    with pytest.raises(LedgerUnsure, match="Input/output error"):
        StoreContents(tmp_path, tmp_path / "shm")


def test_a_start_takes_no_more_memory_than_the_versions_that_are_left(host: Host) -> None:
    ledger = host.contents.ledger
    layout = lay_out([(f"model.layers.{place}.weight", "F32", (16,)) for place in range(2000)])
    for version in range(1, 101):
        ledger.append(Assigned("p", version), Sealed("p", version, "segment", layout))
        ledger.append(CommitRecord("p", version), Retired("p", version))
    size_bytes = ledger.path.stat().st_size
    host.crash()
    tracemalloc.start()
    try:
        contents = host.start()
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert contents.table.assigned == {"p": 100}
    assert peak_bytes < size_bytes / 4
    assert held_bytes < size_bytes / 40


def grow(host: Host, version: int, seed: int) -> int:
    """Versions that come and go, until the ledger is long; returns the last."""
    ledger = host.contents.ledger
    layout = lay_out([(f"model.layers.{place}.weight", "F32", (16,)) for place in range(20_000)])
    while not ledger.is_long:
        version += 1
        ledger.append(Assigned("p", version), Sealed("p", version, "segment", layout))
        ledger.append(CommitRecord("p", version, tag=version), Retired("p", version))
    host.publish(version + 1, seed)
    return version + 1


def test_a_long_ledger_is_shortened_while_the_store_lives_and_means_the_same(
    host: Host, seed: int
) -> None:
    host.publish(1, seed)
    path = host.contents.ledger.path
    last = grow(host, 1, seed)
    long_bytes = path.stat().st_size
    host.contents.shorten()
    assert path.stat().st_size < long_bytes / 10
    host.publish(last + 1, seed)
    host.contents.ledger.append(Retired("p", 1))
    host.crash()
    contents = host.start()
    assert host.held() == [last, last + 1]
    assert contents.table.assigned == contents.table.committed == {"p": last + 1}
    assert contents.table.history == {"p": [*range(1, last + 2)]}
    assert contents.table.tags == {"p": [(version, version) for version in range(2, last)]}
    # Of what was retired, no files are left behind.
    assert sorted(int(each.name) for each in (host.disk / "p").iterdir()) == [last, last + 1]


def test_files_of_a_version_that_was_retired_before_the_ledger_was_shortened_are_deleted(
    host: Host, seed: int
) -> None:
    host.publish(1, seed)
    host.contents.ledger.append(Retired("p", 1))
    last = grow(host, 1, seed)
    host.contents.shorten()
    host.crash()
    host.start()
    assert [int(each.name) for each in (host.disk / "p").iterdir()] == [last]


def test_a_ledger_that_cannot_be_shortened_stays_as_it_is_and_goes_on(
    host: Host,
    seed: int,
    full_disk: Callable[..., AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = host.contents.ledger
    last = grow(host, 0, seed)
    with full_disk():
        host.contents.shorten()
    assert "stays as long as it is" in capsys.readouterr().err
    assert not ledger.is_long  # it is not tried again at once
    host.publish(last + 1, seed)
    host.crash()
    host.start()
    assert host.held() == [last, last + 1]


def test_room_that_was_made_is_there_after_the_ledger_was_shortened(
    host: Host, seed: int, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    last = grow(host, 0, seed)
    contents, ledger = host.contents, host.contents.ledger
    contents.make_room(GROWTH_BYTES)
    contents.shorten()
    layout = lay_out([(f"model.layers.{place}.weight", "F32", (16,)) for place in range(20_000)])
    with full_disk(ledger.path.stat().st_size):
        for version in range(last + 1, last + 8):
            ledger.append(Assigned("p", version), Sealed("p", version, "segment", layout))
    host.crash()
    assert host.start().table.assigned == {"p": last + 7}
