"""Demos that begin in the same second leave their files in directories of their own."""

from pathlib import Path

import pytest

from rolloutbus.errors import SettingsError
from rolloutbus.examples.demo_report import DemoDirectory


def test_runs_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    paths = {DemoDirectory(tmp_path / "runs", seed=1).path for _ in range(20)}
    assert len(paths) == 20
    assert all(path.is_dir() for path in paths)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cannot write .*/file/runs: Not a directory"):
        DemoDirectory(tmp_path / "file" / "runs", seed=1)
