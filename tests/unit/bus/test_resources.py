"""What the system allows is looked at before it runs out."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutbus.bus.actor.resources import (
    ALARM_SHARE,
    RESERVE_FDS,
    WATCH_S,
    ResourceWatch,
    is_scarce,
    provide_fds,
)
from rolloutbus.bus.wire.errors import SettingsError

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240.0
N_OPEN = 200


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    """Of open files: (soft, hard); as before at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one descriptor at a time


def test_the_limit_is_raised_to_what_the_peers_need(limit: tuple[int, int]) -> None:
    soft = n_open() + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limit[1]))
    assert provide_fds(soft) == soft + RESERVE_FDS
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft + RESERVE_FDS


def test_a_limit_that_is_high_enough_is_left_alone(limit: tuple[int, int]) -> None:
    assert provide_fds(1) == limit[0]


def test_too_few_descriptors_are_refused_with_the_number(limit: tuple[int, int]) -> None:
    if limit[1] == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit")
    with pytest.raises(SettingsError, match=f"need {limit[1] + RESERVE_FDS} open files"):
        provide_fds(limit[1])


def grow_scarce() -> None:
    """In a process of its own: what else is open there is known."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch = ResourceWatch()
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open() * 2 + N_OPEN, limit[1]))
    quiet = watch.look(0.0)
    scarce = [os.open("/dev/null", os.O_RDONLY) for _ in range(N_OPEN)]
    try:
        n = n_open()
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(n / ALARM_SHARE), limit[1]))
        assert watch.look(1.0) == [], "it looks no more often than it must"
        (sentence,) = [each for each in watch.look(WATCH_S) if "open files" in each]
        assert "are in use" in sentence
        assert [each for each in watch.look(2 * WATCH_S) if "open files" in each] == []
    finally:
        for fd in scarce:
            os.close(fd)
    assert not [each for each in quiet if "open files" in each]
    assert not [each for each in watch.look(3 * WATCH_S) if "open files" in each]


def test_an_alarm_is_given_once_when_descriptors_grow_scarce() -> None:
    program = "from tests.unit.bus.test_resources import grow_scarce; grow_scarce()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("n_idle", "is_told"), [(0, True), (500, False)])
def test_files_in_memory_that_nobody_uses_make_it_no_scarcer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, n_idle: int, is_told: bool
) -> None:
    content = {"MAX": "1000\n", "CURRENT": "900\n", "STAT": f"anon 1\ninactive_file {n_idle}\n"}
    names = {"MAX": "_CGROUP_LIMIT", "CURRENT": "_CGROUP_USED", "STAT": "_CGROUP_KINDS"}
    for file, text in content.items():
        (tmp_path / file).write_text(text)
        monkeypatch.setattr(f"rolloutbus.bus.actor.resources.{names[file]}", tmp_path / file)
    said = [each for each in ResourceWatch().look(0.0) if "memory" in each]
    assert bool(said) == is_told


def test_the_last_descriptors_are_the_reserve(limit: tuple[int, int]) -> None:
    soft = n_open() + N_OPEN + RESERVE_FDS
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limit[1]))
    assert not is_scarce(soft - RESERVE_FDS - 1)
    assert is_scarce(soft - RESERVE_FDS)
