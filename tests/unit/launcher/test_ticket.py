"""A ticket: a fleet's address and key as one value, for programs on other machines."""

import pickle  # noqa: TID251 - as Ray does; reads what it wrote
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus.bus.security.key_files import read_key_pair, write_key_pair
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.errors import SettingsError
from rolloutbus.types import Ticket

ROUTER = "tcp://192.0.2.7:7777#" + "ab" * 32


def test_a_ticket_takes_its_key_to_another_process_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = new_key_pair("operator")
    write_key_pair(tmp_path / "operator.key", pair)
    (tmp_path / "router.pub").write_text("cd" * 32)
    sent = pickle.dumps(Ticket.of(ROUTER, str(tmp_path / "operator.key")))
    ticket: Ticket = pickle.loads(sent)  # noqa: S301 - our own
    monkeypatch.chdir(tmp_path)
    before = list(tmp_path.iterdir())
    options = ticket.connect_options()
    assert list(tmp_path.iterdir()) == before
    assert ticket.connect_options() == options, "one descriptor, however often it is asked for"
    found = read_key_pair(options["key_file"])
    assert (found.name, found.public, found.reveal()) == ("operator", pair.public, pair.reveal())
    settings = rolloutbus.connect(**options).connection.settings
    assert settings.security is not None
    assert not settings.security.server_key_file, "a key that happens to lie here is none of its"
    assert pair.reveal().hex() not in repr(ticket)


def test_a_client_with_a_ticket_says_what_to_pass_on(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "operator.key", new_key_pair("operator"))
    ticket = Ticket.of(ROUTER, str(tmp_path / "operator.key"))
    client = rolloutbus.connect(**ticket.connect_options())
    with pytest.raises(SettingsError, match="in this process's memory: pass on the fleet's ticket"):
        client.connect_options["key_file"]


def test_a_fleet_that_only_this_machine_can_reach_has_no_ticket() -> None:
    with pytest.raises(SettingsError, match=r"socket of this machine, .* secure=…, or on Ray"):
        Ticket.of("ipc:///tmp/frontend", "")


def test_an_address_without_keys_needs_none() -> None:
    options = Ticket.of("tcp://127.0.0.1:7777", "").connect_options()
    assert options == {"address": "tcp://127.0.0.1:7777", "key_file": "", "fleet": ""}
