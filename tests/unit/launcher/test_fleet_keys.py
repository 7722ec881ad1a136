"""The keys of a local fleet: made once, added to, and never given back to who was revoked."""

import stat
from pathlib import Path

import pytest

from rolloutbus.bus.security.key_files import (
    edit_allow_list,
    read_allow_list,
    read_key_pair,
    read_public_key,
)
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.plan import FleetKeys


def roles(directory: Path) -> dict[str, str]:
    return {each.name: each.role for each in read_allow_list(directory / "allow.json")}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_missing_keys_are_made_in_a_directory_of_this_users_own(directory: Path) -> None:
    keys = FleetKeys(directory)
    keys.make({"store": "store", "w0": "worker"})
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert roles(directory) == {"store": "store", "w0": "worker", "operator": "admin"}
    for name in ("router", "store", "w0", "operator"):
        assert read_key_pair(keys.security_of(name).key_file).name == name


def test_everybody_is_told_where_the_routers_key_of_the_day_stands(directory: Path) -> None:
    FleetKeys(directory).make({"w0": "worker"})
    (directory / "router.pub").unlink()
    keys = FleetKeys(directory)
    keys.make({"w0": "worker"})
    router = read_key_pair(directory / "router.key")
    assert read_public_key(keys.security_of("w0").server_key_file) == router.public


def test_second_start_keeps_what_is_there_and_adds_what_is_new(directory: Path) -> None:
    FleetKeys(directory).make({"w0": "worker"})
    before = read_key_pair(directory / "w0.key").public
    FleetKeys(directory).make({"w0": "worker", "w1": "worker"})
    assert read_key_pair(directory / "w0.key").public == before
    assert roles(directory) == {"w0": "worker", "w1": "worker", "operator": "admin"}


def test_revoked_worker_is_not_let_in_by_a_second_start(directory: Path) -> None:
    FleetKeys(directory).make({"w0": "worker"})
    edit_allow_list(directory / "allow.json", lambda known: [p for p in known if p.name != "w0"])
    FleetKeys(directory).make({"w0": "worker"})
    assert roles(directory) == {"operator": "admin"}


def test_lost_allow_list_is_made_again_from_the_keys(directory: Path) -> None:
    FleetKeys(directory).make({"w0": "worker"})
    (directory / "allow.json").unlink()
    FleetKeys(directory).make({"w0": "worker"})
    assert roles(directory) == {"w0": "worker", "operator": "admin"}


def test_key_that_others_can_read_stops_the_start(directory: Path) -> None:
    FleetKeys(directory).make({"w0": "worker"})
    (directory / "w0.key").chmod(0o644)
    with pytest.raises(SettingsError, match="0644"):
        FleetKeys(directory).make({"w0": "worker"})


def test_an_actor_on_another_machine_gets_its_own_key_and_no_other(
    directory: Path, tmp_path: Path
) -> None:
    keys = FleetKeys(directory)
    keys.make({"store": "store", "w0": "worker", "w1": "worker"})
    there = FleetKeys(tmp_path / "there")
    there.write(keys.files_of("w0"))
    security = there.security_of("w0")
    assert read_key_pair(security.key_file).public == read_key_pair(directory / "w0.key").public
    assert read_public_key(security.server_key_file) == read_public_key(directory / "router.pub")
    assert roles(tmp_path / "there") == roles(directory)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        "w0.key",
        "router.pub",
        "allow.json",
    }
