"""Key files: made once, for one user's eyes, and never shown."""

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutbus.bus.security.key_files import (
    is_there,
    public_file,
    read_key_pair,
    read_public_key,
    router_addresses_beside,
    router_key_beside,
    write_key_pair,
    write_public_key,
)
from rolloutbus.bus.security.keys import KeyPair
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.bus.wire.errors import SettingsError


@pytest.fixture
def pair() -> KeyPair:
    return new_key_pair("ann")


def test_key_file_gives_back_the_pair(tmp_path: Path, pair: KeyPair) -> None:
    file = tmp_path / "ann.key"
    write_key_pair(file, pair)
    read = read_key_pair(file)
    assert (read.name, read.public, read.reveal()) == (pair.name, pair.public, pair.reveal())
    assert public_file(file).read_text().strip() == pair.public


def test_key_file_is_for_its_user_alone_whatever_the_umask(tmp_path: Path, pair: KeyPair) -> None:
    file = tmp_path / "ann.key"
    before = os.umask(0)
    try:
        write_key_pair(file, pair)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_key_is_never_overwritten(tmp_path: Path, pair: KeyPair) -> None:
    file = tmp_path / "ann.key"
    write_key_pair(file, pair)
    with pytest.raises(SettingsError, match="exists already"):
        write_key_pair(file, new_key_pair("ann"))
    assert read_key_pair(file).public == pair.public


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may have more than 10 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path, pair: KeyPair) -> None:
    with pytest.raises(SettingsError, match=r"cannot write .*ann\.key"):
        write_key_pair(tmp_path / "ann.key", pair)
    with pytest.raises(OSError, match="too large"):
        write_public_key(tmp_path / "router.pub", pair.public)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_looked_into_is_told(tmp_path: Path) -> None:
    file = tmp_path / ("x" * 256) / "ann.key"  # refused also to root
    for look in (
        router_key_beside,
        router_addresses_beside,
        is_there,
    ):
        with pytest.raises(SettingsError, match="File name too long"):
            look(file)


def test_key_is_not_written_through_a_link(tmp_path: Path, pair: KeyPair) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "ann.key").symlink_to(target)
    with pytest.raises(SettingsError):
        write_key_pair(tmp_path / "ann.key", pair)
    assert not target.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601, 0o620])
def test_key_file_that_others_may_use_is_refused(tmp_path: Path, pair: KeyPair, mode: int) -> None:
    file = tmp_path / "ann.key"
    write_key_pair(file, pair)
    file.chmod(mode)
    with pytest.raises(SettingsError, match=f"{mode:04o}"):
        read_key_pair(file)


def test_link_to_a_key_file_is_refused(tmp_path: Path, pair: KeyPair) -> None:
    write_key_pair(tmp_path / "ann.key", pair)
    (tmp_path / "link.key").symlink_to(tmp_path / "ann.key")
    with pytest.raises(SettingsError):
        read_key_pair(tmp_path / "link.key")


def test_pipe_in_place_of_a_key_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ann.key", 0o600)
    with pytest.raises(SettingsError, match="regular"):
        read_key_pair(tmp_path / "ann.key")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"name": "ann"}',
        b'{"name": "ann", "public": "zz", "secret": "5ec2e7"}',
        b'{"name": "ann", "public": "' + b"0" * 64 + b'", "secret": "5ec2e7"}',
    ],
)
def test_file_without_a_key_is_refused_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ann.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match="no key file") as caught:
        read_key_pair(file)
    assert "5ec2e7" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_secret_shows_in_no_text_of_the_pair(pair: KeyPair) -> None:
    secret = pair.reveal()
    for text in (repr(pair), str(pair), f"{pair}", f"{[pair]}"):
        assert secret.hex() not in text
        assert repr(secret) not in text


def test_public_key_is_read_back_and_replaced_in_one_piece(tmp_path: Path) -> None:
    file = tmp_path / "router.pub"
    assert router_key_beside(tmp_path / "ann.key") == ""
    for name in ("old", "new"):
        key = new_key_pair(name).public
        write_public_key(file, key)
        assert read_public_key(file) == key
    assert router_key_beside(tmp_path / "ann.key") == str(file)
    assert list(tmp_path.iterdir()) == [file]


def test_public_key_that_others_may_write_is_not_used(tmp_path: Path, pair: KeyPair) -> None:
    file = tmp_path / "router.pub"
    write_public_key(file, pair.public)
    file.chmod(0o664)
    with pytest.raises(SettingsError, match="able to write"):
        read_public_key(file)


@pytest.mark.parametrize("content", [b"", b"zz", b"\xff" * 64, b"a" * 65])
def test_file_without_a_public_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "router.pub"
    file.write_bytes(content)
    file.chmod(0o644)
    with pytest.raises(SettingsError, match="64 hexadecimal digits"):
        read_public_key(file)
