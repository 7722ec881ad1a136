"""`rolloutbus keys`: what it writes, what it prints, what it never prints."""

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutbus.bus.security.invites import Token, read_token
from rolloutbus.bus.security.key_files import (
    RouterAddresses,
    read_allow_list,
    read_key_pair,
    write_router_addresses,
)
from rolloutbus.cli.app import app


class Keys:
    """The command, run in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runner = CliRunner()

    def run(self, *arguments: str, status: int = 0) -> str:
        result = self._runner.invoke(app, ["keys", *arguments])
        assert result.exit_code == status, result.output
        for file in self.directory.glob("*.key"):
            assert read_key_pair(file).reveal().hex() not in result.output
        return result.output.strip()

    def allowed(self) -> dict[str, str]:
        return {each.key: each.name for each in read_allow_list(self.directory / "allow.json")}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.chdir(tmp_path)
    return Keys(tmp_path)


@pytest.mark.parametrize("command", ["new", "show", "allow", "invite", "join", "revoke", "rotate"])
def test_help_of_every_keys_command_has_an_example(keys: Keys, command: str) -> None:
    assert f"Example: rolloutbus keys {command}" in keys.run(command, "--help")


def test_new_key_is_its_owners_alone_and_only_its_public_half_is_shown(
    keys: Keys, tmp_path: Path
) -> None:
    public = keys.run("new", "ann")
    assert stat.S_IMODE((tmp_path / "ann.key").stat().st_mode) == 0o600
    assert (tmp_path / "ann.pub").read_text().strip() == public
    assert json.loads(keys.run("show", "ann.key")) == {"name": "ann", "key": public}
    assert "exists already" in keys.run("new", "ann", status=2)


@pytest.mark.parametrize("given", ["ann.pub", "ann.key", "the key itself"])
def test_key_is_let_in_by_file_or_by_itself_until_it_is_revoked(keys: Keys, given: str) -> None:
    public = keys.run("new", "ann")
    key = public if given == "the key itself" else given
    keys.run("allow", key, "--name", "ann", "--role", "trainer", "--session", "s-*")
    assert keys.allowed() == {public: "ann"}
    shown = f"{public} trainer ann: may be ann ann-*, sessions s-*"
    assert keys.run("show") == keys.run("show", "allow.json") == shown
    keys.run("revoke", "ann")
    assert keys.allowed() == {}
    assert "nobody has" in keys.run("revoke", "ann", status=2)


def test_what_is_no_key_file_is_not_said_to_be_open_to_others(keys: Keys) -> None:
    keys.run("new", "ann")
    assert "ann.pub is no key file" in keys.run("show", "ann.pub", status=2)
    assert ". is not a regular file" in keys.run("show", ".", status=2)


def test_rotated_key_and_its_predecessor_are_let_in_until_the_old_one_is_revoked(
    keys: Keys,
) -> None:
    old = keys.run("new", "ann")
    keys.run("allow", old, "--name", "ann", "--role", "client")
    said = json.loads(keys.run("rotate", "ann.key"))
    assert said["old"] == old
    assert keys.allowed() == {old: "ann", said["new"]: "ann"}
    assert read_key_pair("ann.key").public == said["new"]
    assert read_key_pair("ann.old.key").public == old
    assert Path("ann.pub").read_text().strip() == said["new"]
    assert "remove it when nothing uses its key" in keys.run("rotate", "ann.key", status=2)
    keys.run("revoke", old)
    assert keys.allowed() == {said["new"]: "ann"}


def test_a_rotation_that_cannot_edit_the_list_changes_nothing_and_may_be_repeated(
    keys: Keys, tmp_path: Path
) -> None:
    old = keys.run("new", "ann")
    keys.run("allow", old, "--name", "ann", "--role", "client")
    (tmp_path / "allow.json").chmod(0o666)
    files = {each.name for each in tmp_path.iterdir()}
    said = keys.run("rotate", "ann.key", status=2)
    assert "only this user or root may be able to write it" in said
    assert {each.name for each in tmp_path.iterdir()} == files
    assert read_key_pair("ann.key").public == Path("ann.pub").read_text().strip() == old
    (tmp_path / "allow.json").chmod(0o644)
    assert json.loads(keys.run("rotate", "ann.key"))["old"] == old


def test_who_rotates_is_told_what_is_left_to_do_elsewhere(keys: Keys) -> None:
    keys.run("new", "router")
    assert "copy router.pub to each other host" in keys.run("rotate", "router.key")
    keys.run("new", "host-b")
    assert "stands in no allow-list here" in keys.run("rotate", "host-b.key")
    assert "no such file" in keys.run("rotate", "host-b.key", "-l", "else.json", status=2)


def test_rotation_edits_the_allow_list_beside_the_key(keys: Keys, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    old = keys.run("new", "w0", "--dir", "fleet")
    keys.run("allow", old, "--name", "w0", "--role", "worker", "-l", "fleet/allow.json")
    new = json.loads(keys.run("rotate", "fleet/w0.key"))["new"]
    assert new in keys.run("show", "-l", "fleet/allow.json")
    assert (fleet / "w0.pub").read_text().strip() == new


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("allow nowhere.pub --name a --role client", "neither a public key nor a file"),
        ("allow zz.key --name a --role client", "cannot read the key file"),
        (f"allow {'0' * 64} --name a --role god", "god"),
        (f"allow {'0' * 64} --name a@b --role client", "is no name"),
        ("show nowhere.key", "cannot read the key file"),
        ("show", "cannot read allow.json"),
        ("revoke ann", "cannot read allow.json"),
        ("rotate nowhere.key", "cannot read the key file"),
        ("new ann --dir /nowhere/at/all", "cannot write"),
    ],
)
def test_mistakes_are_told_in_a_line_and_with_status_2(
    keys: Keys, line: str, complaint: str
) -> None:
    assert complaint in keys.run(*line.split(), status=2)


ROUTER_AT = ("--router", "tcp://10.0.0.1:7778#" + "ab" * 32)


def test_an_invitation_is_listed_until_it_is_withdrawn_and_its_token_is_printed_once(
    keys: Keys,
) -> None:
    token = keys.run("invite", "host-b", "--role", "worker", *ROUTER_AT)
    assert read_token(token).name == "host-b"
    shown = keys.run("show")
    assert "worker host-b: good until" in shown
    assert token not in shown
    assert token not in (keys.directory / "allow.json").read_text()
    keys.run("revoke", "host-b")
    assert keys.run("show") == ""


def test_whoever_has_a_key_is_not_invited(keys: Keys) -> None:
    keys.run("new", "host-b")
    keys.run("allow", "host-b.pub", "--name", "host-b", "--role", "worker")
    told = keys.run("invite", "host-b", "--role", "worker", *ROUTER_AT, status=2)
    assert "revoke it first" in told


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ((), "router.pub"),
        (("--router", "tcp://0.0.0.0:7778#" + "ab" * 32), "where the new host reaches it"),
        (("--router", "tcp://127.0.0.1:7778#" + "ab" * 32), "no other one can join"),
        (("--router", "tcp://[::1:7778"), "only ipc://PATH and tcp://HOST:PORT"),
    ],
)
def test_an_address_that_no_other_host_reaches_is_told(
    keys: Keys, address: tuple[str, ...], told: str
) -> None:
    status = 0 if "127.0.0.1" in "".join(address) else 2
    assert told in keys.run("invite", "host-b", "--role", "worker", *address, status=status)


def test_who_joins_a_router_with_a_standby_is_told_of_both(keys: Keys) -> None:
    keys.run("new", "router")
    left = RouterAddresses("tcp://10.0.0.1:7777,tcp://10.0.0.2:7777", "tcp://10.0.0.1:7778")
    write_router_addresses(keys.directory, left)
    token = keys.run("invite", "trainer", "--role", "trainer")
    assert read_token(token).address == left.frontend
    told = keys.run("invite", "host-b", "--role", "worker", status=2)
    assert "the backends of both" in told
    both = ("--router", "tcp://10.0.0.1:7778,tcp://10.0.0.2:7778")
    assert read_token(keys.run("invite", "host-b", "--role", "worker", *both)).address == both[1]
    started = CliRunner().invoke(app, ["store", "--directory", "v", "--key", "router.key"])
    assert started.exit_code == 2
    assert "the backend of one of them: say both" in started.output


def test_a_token_of_another_kind_is_refused_without_a_key(keys: Keys) -> None:
    told = keys.run("join", "no-token", status=1)
    assert "invite_malformed" in told
    assert not list(keys.directory.glob("*.key"))


def test_a_token_whose_address_is_none_is_refused_without_a_key(keys: Keys) -> None:
    there, secret, router_key = ("", "tcp://host b:7778"), b"\1" * 32, b"\2" * 32
    token = Token(secret, router_key, 2_000_000_000, "host-b", "worker", *there)
    told = keys.run("join", token.text(), status=2)
    assert "tcp://host b:7778: only ipc://PATH and tcp://HOST:PORT" in told
    assert "keys invite --router" in told
    assert not list(keys.directory.glob("*.key"))
