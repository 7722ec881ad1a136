import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rolloutbus.bus.paths import WEIGHTS, check_path
from rolloutbus.bus.weights.manifest import Bytes, lay_out, total_bytes
from rolloutbus.bus.weights.tensor_files import MANIFEST, shard_name
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.trainer_adapter.store.files import WeightFiles, place_of

LAYOUT = lay_out([("a", "F32", (16, 4)), ("b", "BF16", (8,))])
KEY = ("default", 3)


def some_bytes(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, total_bytes(LAYOUT), np.uint8)


def written(root: Path, content: Bytes) -> WeightFiles:
    files = WeightFiles(root / "disk", "me")
    assert files.write(KEY, LAYOUT, content) == "default/3"
    return files


def test_a_written_version_is_read_back(tmp_path: Path, seed: int) -> None:
    content, again = some_bytes(seed), np.zeros(total_bytes(LAYOUT), np.uint8)
    written(tmp_path, content).read(KEY, LAYOUT, again)
    assert again.tobytes() == content.tobytes()


def test_files_are_private_and_the_digests_lie_beside_them(tmp_path: Path, seed: int) -> None:
    written(tmp_path, some_bytes(seed))
    version = tmp_path / "disk/default/3"
    assert {each.name for each in version.iterdir()} == {shard_name(1), MANIFEST}
    found = [tmp_path / "disk", version.parent, version, *version.iterdir()]
    assert {each.stat().st_mode & 0o077 for each in found} == {0}


def test_a_version_appears_whole_or_not_at_all(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WeightFiles(tmp_path, "me")

    def fail(fd: int) -> None:
        raise OSError(28, "no space left", str(fd))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            files.write(KEY, LAYOUT, some_bytes(seed))
    assert not files.has(KEY)
    assert [each.name for each in tmp_path.iterdir()] == ["default"]


def test_a_version_that_is_there_is_never_written_over(tmp_path: Path, seed: int) -> None:
    first, again = some_bytes(seed), np.zeros(total_bytes(LAYOUT), np.uint8)
    files = written(tmp_path, first)
    with pytest.raises(OSError, match="not empty"):
        files.write(KEY, LAYOUT, some_bytes(seed + 1))
    files.read(KEY, LAYOUT, again)
    assert again.tobytes() == first.tobytes()


def test_a_store_that_leaves_does_not_end_its_write(tmp_path: Path, seed: int) -> None:
    files = WeightFiles(tmp_path, "me")
    files.close()
    with pytest.raises(OSError, match="leaving"):
        files.write(KEY, LAYOUT, some_bytes(seed))
    assert not files.has(KEY)


def test_removing_is_idempotent(tmp_path: Path, seed: int) -> None:
    files = written(tmp_path, some_bytes(seed))
    files.remove(KEY)
    files.remove(KEY)
    assert not files.has(KEY)
    with pytest.raises(Refused):
        files.read(KEY, LAYOUT, np.zeros(total_bytes(LAYOUT), np.uint8))


def test_what_readers_keep_of_one_version_is_not_in_the_way_of_the_next(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = some_bytes(seed)
    files = written(tmp_path, content)
    files.write(("default", 4), LAYOUT, content)

    def rmtree(path: Path, *, ignore_errors: bool) -> None:
        """Leaves what is open, as NFS does."""
        assert path.is_dir()
        assert ignore_errors

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        files.remove(KEY)
        files.remove(("default", 4))
    assert not files.has(KEY)
    assert not files.has(("default", 4))
    files.sweep(["me"])
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["default"]


def test_only_leftovers_of_dead_stores_are_swept(tmp_path: Path, seed: int) -> None:
    files = written(tmp_path, some_bytes(seed))
    for name in (".dead-default-4", ".alive-default-4"):
        (tmp_path / "disk" / name).mkdir()
    files.sweep(["dead"])
    assert {each.name for each in (tmp_path / "disk").iterdir()} == {"default", ".alive-default-4"}


@pytest.mark.parametrize(
    "policy", ["default", "llama-3.1", "..", "a/b", "x-61", "Ω", ".ledger", "a:b", "-", "x" * 64]
)
def test_every_policy_has_a_directory_of_its_own_below_the_root(
    tmp_path: Path, policy: str, seed: int
) -> None:
    files = WeightFiles(tmp_path, "me")
    at = files.write((policy, 7), LAYOUT, some_bytes(seed))
    assert at == place_of((policy, 7))
    assert check_path(f"{at}/{shard_name(1)}", WEIGHTS) is None
    assert list(files.taken()) == [(policy, 7)]
