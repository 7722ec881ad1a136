import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rolloutbus.bus.weights.shm import SegmentGone, SegmentReader, SegmentWriter
from rolloutbus.trainer_adapter.store.segments import (
    AHEAD_BYTES,
    GRAIN_BYTES,
    SegmentPool,
    StoreFull,
    sweep,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SegmentPool]:
    pool = SegmentPool(tmp_path)
    yield pool
    pool.close()


def _fill(pool: SegmentPool, byte: int, size_bytes: int = 100) -> str:
    name = pool.take(size_bytes)
    pool.content(name)[:size_bytes] = byte
    pool.freeze(name)
    return name


def test_segments_are_private_and_their_names_are_random(pool: SegmentPool, tmp_path: Path) -> None:
    names = [pool.take(1), pool.take(GRAIN_BYTES + 1)]
    for name in names:
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert [(tmp_path / name).stat().st_size for name in names] == [GRAIN_BYTES, 2 * GRAIN_BYTES]
    assert len(set(names)) == 2


def test_writer_and_reader_see_the_same_bytes(pool: SegmentPool, tmp_path: Path) -> None:
    name = pool.take(100)
    SegmentWriter(tmp_path).content(name, 100)[:] = 7
    pool.freeze(name)
    pin = SegmentReader(tmp_path).pin(name, 100)
    assert pin.content.tolist() == [7] * 100
    pin.release()


def test_a_reader_cannot_pin_what_is_being_written(pool: SegmentPool, tmp_path: Path) -> None:
    with pytest.raises(SegmentGone, match="rewritten"):
        SegmentReader(tmp_path).pin(pool.take(100), 100)


def test_a_retired_segment_is_reused_under_a_new_name(pool: SegmentPool, tmp_path: Path) -> None:
    old = _fill(pool, 1)
    inode = (tmp_path / old).stat().st_ino
    pool.retire(old, is_reusable=True)
    new = pool.take(100)
    assert new != old
    assert (tmp_path / new).stat().st_ino == inode
    with pytest.raises(SegmentGone):
        SegmentReader(tmp_path).pin(old, 100)


def test_a_pinned_segment_is_not_rewritten_until_it_is_released(
    pool: SegmentPool, tmp_path: Path
) -> None:
    name = _fill(pool, 1)
    inode = (tmp_path / name).stat().st_ino
    pin = SegmentReader(tmp_path).pin(name, 100)
    pool.retire(name, is_reusable=True)
    other = _fill(pool, 2)
    assert (tmp_path / other).stat().st_ino != inode
    assert pin.content.tolist() == [1] * 100
    pin.release()
    assert (tmp_path / pool.take(100)).stat().st_ino == inode


def test_a_segment_is_not_rewritten_while_a_part_of_it_is_held(
    pool: SegmentPool, tmp_path: Path
) -> None:
    name = _fill(pool, 1)
    inode = (tmp_path / name).stat().st_ino
    part = SegmentReader(tmp_path).pin(name, 100).content[10:20]
    pool.retire(name, is_reusable=True)
    other = _fill(pool, 2)
    assert (tmp_path / other).stat().st_ino != inode
    assert part.tolist() == [1] * 10
    del part
    assert (tmp_path / pool.take(100)).stat().st_ino == inode


def test_a_reader_sees_the_new_bytes_of_a_reused_segment(pool: SegmentPool, tmp_path: Path) -> None:
    reader = SegmentReader(tmp_path)
    for byte in range(5):
        name = _fill(pool, byte)
        pin = reader.pin(name, 100)
        assert pin.content.tolist() == [byte] * 100
        pin.release()
        pool.retire(name, is_reusable=True)


def test_writing_to_a_pinned_view_reaches_nobody(pool: SegmentPool, tmp_path: Path) -> None:
    name = _fill(pool, 1)
    pin = SegmentReader(tmp_path).pin(name, 100)
    pin.content[:] = 9
    assert pool.content(name)[:100].tolist() == [1] * 100
    pin.release()


def test_closing_unlinks_everything(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path)
    _fill(pool, 1)
    pool.retire(_fill(pool, 2), is_reusable=True)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_one_that_leaves_keeps_only_what_a_successor_may_adopt(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path)
    used = _fill(pool, 1)
    pool.retire(_fill(pool, 2), is_reusable=True)
    assert pool.make_ahead(2 * AHEAD_BYTES)
    os.utime(tmp_path / f"rolloutbus-{pool.owner}.lock", (0, 0))  # it began long ago
    pool.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [used, f"rolloutbus-{pool.owner}.lock"]
    )
    assert sweep(tmp_path) == []
    assert sweep(tmp_path, min_age_s=0) == [used]
    SegmentPool(tmp_path).leave()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_was_made_ahead_is_taken_next(pool: SegmentPool, tmp_path: Path) -> None:
    size_bytes = AHEAD_BYTES + 1
    assert pool.make_ahead(size_bytes)
    assert not pool.make_ahead(size_bytes)
    (made,) = tmp_path.glob("rolloutbus-*-*")
    assert not pool.make_ahead(size_bytes)  # one is enough
    name = pool.take(size_bytes)
    assert name == made.name
    with pytest.raises(SegmentGone, match="rewritten"):
        SegmentReader(tmp_path).pin(name, size_bytes)
    pool.content(name)[:] = 7


def test_a_segment_that_is_half_made_is_taken_and_completed(
    pool: SegmentPool, tmp_path: Path
) -> None:
    size_bytes = AHEAD_BYTES + 1
    assert pool.make_ahead(size_bytes)
    (made,) = tmp_path.glob("rolloutbus-*-*")
    assert pool.take(size_bytes) == made.name
    assert made.stat().st_size == AHEAD_BYTES + GRAIN_BYTES
    assert made.stat().st_blocks * 512 >= AHEAD_BYTES + GRAIN_BYTES


def test_nothing_is_made_ahead_while_a_reader_is_about_to_let_go_of_a_segment(
    pool: SegmentPool, tmp_path: Path
) -> None:
    name = _fill(pool, 1, AHEAD_BYTES)
    pin = SegmentReader(tmp_path).pin(name, 100)
    pool.retire(name, is_reusable=True)
    assert not pool.make_ahead(AHEAD_BYTES)
    assert len([*tmp_path.glob("rolloutbus-*-*")]) == 1
    pin.release()


def test_what_cannot_be_made_ahead_is_left_for_later(pool: SegmentPool, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no file can be opened
    try:
        is_unfinished = pool.make_ahead(AHEAD_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_unfinished
    assert [*tmp_path.glob("rolloutbus-*-*")] == []
    assert pool.make_ahead(AHEAD_BYTES + 1)


def test_small_segments_are_not_made_ahead(pool: SegmentPool, tmp_path: Path) -> None:
    assert not pool.make_ahead(AHEAD_BYTES - 1)
    assert [*tmp_path.glob("rolloutbus-*-*")] == []


def test_what_is_half_made_gives_way_to_what_is_needed(pool: SegmentPool, tmp_path: Path) -> None:
    assert pool.make_ahead(2 * AHEAD_BYTES)
    (made,) = tmp_path.glob("rolloutbus-*-*")
    with pytest.raises(StoreFull):
        pool.take(1 << 60)
    assert not made.exists()


@pytest.mark.parametrize("name", ["../etc/passwd", "rolloutbus-x", "", "a" * 500])
def test_only_names_of_segments_are_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(SegmentGone):
        SegmentReader(tmp_path).pin(name, 1)


def test_links_and_open_files_are_not_taken_for_segments(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(b"x" * 100)
    link = tmp_path / f"rolloutbus-{'0' * 16}-{'0' * 16}"
    link.symlink_to(target)
    world = tmp_path / f"rolloutbus-{'0' * 16}-{'1' * 16}"
    world.write_bytes(b"x" * 100)
    world.chmod(0o644)
    short = tmp_path / f"rolloutbus-{'0' * 16}-{'2' * 16}"
    short.write_bytes(b"x" * 99)
    short.chmod(0o600)
    for path in (link, world, short):
        with pytest.raises(SegmentGone):
            SegmentReader(tmp_path).pin(path.name, 100)


def test_more_than_fits_is_refused_and_leaves_nothing(pool: SegmentPool, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreFull):
        pool.take(1 << 60)
    assert sorted(tmp_path.iterdir()) == before


def test_a_segment_that_others_delete_is_dropped_and_the_pool_goes_on(
    pool: SegmentPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = _fill(pool, 1)
    (tmp_path / name).unlink()
    n_before = len([*Path("/proc/self/fd").iterdir()])
    pool.retire(name, is_reusable=True)
    assert f"somebody deleted {tmp_path / name}" in capsys.readouterr().err
    assert len([*Path("/proc/self/fd").iterdir()]) == n_before - 2  # its own, its map's
    new = pool.take(100)
    SegmentWriter(tmp_path).content(new, 100)[:] = 7
    assert pool.content(new)[:100].tolist() == [7] * 100


def test_a_free_segment_that_others_delete_is_not_given_to_a_writer(
    pool: SegmentPool, tmp_path: Path
) -> None:
    pool.retire(_fill(pool, 1), is_reusable=True)
    assert pool.make_ahead(2 * AHEAD_BYTES)
    for path in tmp_path.glob("rolloutbus-*-*"):
        path.unlink()
    for size_bytes in (100, 2 * AHEAD_BYTES):
        name = pool.take(size_bytes)
        SegmentWriter(tmp_path).content(name, size_bytes)[:] = 7
        assert pool.content(name)[:100].tolist() == [7] * 100


def test_where_no_segment_can_be_made_at_all_the_pool_says_that_it_is_full(tmp_path: Path) -> None:
    directory = tmp_path / "shm"
    directory.mkdir()
    pool = SegmentPool(directory)
    shutil.rmtree(directory)
    with pytest.raises(StoreFull, match="No such file or directory"):
        pool.take(100)
    pool.close()


_DYING_STORE = """
import os, sys
from pathlib import Path
from rolloutbus.trainer_adapter.store.segments import SegmentPool
pool = SegmentPool(Path(sys.argv[1]))
name = pool.take(100)
pool.content(name)[:100] = 5
pool.freeze(name)
print(name, flush=True)
os._exit(0)  # as after SIGKILL: nothing is cleaned up
"""


def _die_with_segments(directory: Path) -> list[str]:
    """Names of what a dead store left behind."""
    command = [sys.executable, "-c", _DYING_STORE, str(directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_segments_of_dead_stores_are_swept_and_those_of_living_ones_stay(
    pool: SegmentPool, tmp_path: Path
) -> None:
    mine = _fill(pool, 1)
    left = _die_with_segments(tmp_path)
    assert sweep(tmp_path) == []  # a successor may be about to adopt them
    assert sweep(tmp_path, min_age_s=0) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [mine, f"rolloutbus-{pool.owner}.lock"]
    )


def test_each_successor_adopts_the_bytes_of_a_dead_store(tmp_path: Path) -> None:
    (left,) = _die_with_segments(tmp_path)
    owner = left.split("-")[1]
    lock = tmp_path / f"rolloutbus-{owner}.lock"
    for _ in range(2):
        os.utime(lock, (0, 0))  # it died long ago
        pool = SegmentPool(tmp_path, owner)
        assert lock.stat().st_mtime > 0  # from now on there is time for the next one
        pool.adopt(left, 100)
        assert sweep(tmp_path, min_age_s=0) == []
        pin = SegmentReader(tmp_path).pin(left, 100)
        assert pin.content.tolist() == [5] * 100
        pin.release()
        pool.leave()
    assert sweep(tmp_path, min_age_s=0) == [left]
    assert list(tmp_path.iterdir()) == []


def test_the_segments_of_a_living_store_are_not_adopted(pool: SegmentPool, tmp_path: Path) -> None:
    name = _fill(pool, 1)
    other = SegmentPool(tmp_path, pool.owner)
    with pytest.raises(SegmentGone, match="another store's"):
        other.adopt(name, 100)
    other.close()
    assert (tmp_path / name).exists()


def _instead(act: Callable[[], None], _s: float) -> None:
    """Something happens while somebody sleeps."""
    act()


def test_a_lock_that_the_kernel_has_not_taken_from_a_killed_store_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = SegmentPool(tmp_path)
    left = _fill(dying, 1)
    monkeypatch.setattr(time, "sleep", partial(_instead, dying.leave))
    successor = SegmentPool(tmp_path, dying.owner)
    successor.adopt(left, 100)
    successor.close()


def test_a_store_whose_lock_was_swept_meanwhile_or_is_another_users_becomes_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = SegmentPool(tmp_path)
    with monkeypatch.context() as patched:
        # Deletes the lock, then lets go of it.
        patched.setattr(time, "sleep", partial(_instead, swept.close))
        other = SegmentPool(tmp_path, swept.owner)
    assert other.owner != swept.owner
    other.close()
    (tmp_path / f"rolloutbus-{swept.owner}.lock").touch()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    other = SegmentPool(tmp_path, swept.owner)
    assert other.owner != swept.owner
    other.close()


@pytest.mark.parametrize("kind", [SegmentReader, SegmentWriter])
def test_one_that_nobody_holds_any_more_keeps_nothing_open(
    pool: SegmentPool, tmp_path: Path, kind: type[SegmentReader | SegmentWriter]
) -> None:
    name = _fill(pool, 1, 100)
    n_before = len([*Path("/proc/self/fd").iterdir()])
    maps = kind(tmp_path)
    if isinstance(maps, SegmentReader):
        maps.pin(name, 100).release()
    else:
        maps.content(name, 100)
    assert len([*Path("/proc/self/fd").iterdir()]) > n_before
    del maps
    assert len([*Path("/proc/self/fd").iterdir()]) == n_before
