import os
import shutil
from pathlib import Path

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.run_dir import RunDirectory, user_dir


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_run_directory_is_private_and_gone_afterwards() -> None:
    with RunDirectory() as run_dir:
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        assert user_dir().stat().st_mode & 0o777 == 0o700
        (run_dir.logs / "w0.log").write_text("hello")
    assert not run_dir.path.exists()


def test_kept_logs_survive_and_nothing_else_does() -> None:
    with RunDirectory(keep_logs=True) as run_dir:
        (run_dir.logs / "w0.log").write_text("hello")
        (run_dir.path / "frontend").touch()
    with RunDirectory():
        left = {str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("*")}
    assert left == {"kept", "logs", "logs/w0.log"}


def test_link_in_the_directory_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").touch()
    with RunDirectory(keep_logs=True) as run_dir:
        (run_dir.path / "link").symlink_to(tmp_path / "elsewhere")
    assert {path.name for path in run_dir.path.iterdir()} == {"kept", "logs"}
    assert (tmp_path / "elsewhere" / "thesis.tex").exists()


def test_given_link_to_a_directory_is_emptied_and_serves_again(tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "large_disk")
    for _ in range(2):
        with RunDirectory(tmp_path / "mine") as run_dir:
            assert (tmp_path / "large_disk" / run_dir.logs.name).is_dir()
        assert list((tmp_path / "mine").iterdir()) == []


def test_directory_of_a_killed_launcher_is_swept_and_that_of_a_live_one_is_not() -> None:
    dead = user_dir() / "run-dead"
    dead.mkdir()
    (dead / "lock").touch()
    with RunDirectory() as first, RunDirectory():
        assert not dead.exists()
        assert first.path.exists()


def test_given_directory_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(SettingsError, match="is not empty"), RunDirectory(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_link_in_place_of_the_users_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"rolloutbus-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="not a directory of this user's"):
        user_dir()


def test_given_directory_of_a_killed_launcher_is_used_again(tmp_path: Path) -> None:
    given = tmp_path / "mine"
    with RunDirectory(given) as first:
        (first.logs / "w0.log").write_text("hello")
        with pytest.raises(SettingsError, match="a fleet that runs uses"), RunDirectory(given):
            pass
        shutil.copytree(given, tmp_path / "dead")  # what SIGKILL leaves: nobody holds the lock
    with RunDirectory(tmp_path / "dead") as again:
        assert list(again.logs.iterdir()) == []
