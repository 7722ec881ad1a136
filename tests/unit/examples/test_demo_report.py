"""Demos that begin in the same second leave their files in directories of their own."""

from pathlib import Path

from rolloutbus.examples.demo_report import DemoDirectory


def test_runs_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    paths = {DemoDirectory(tmp_path / "runs", seed=1).path for _ in range(20)}
    assert len(paths) == 20
    assert all(path.is_dir() for path in paths)
