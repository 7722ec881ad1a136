"""Which fleet runs here: a small file that `up` writes and the other commands read."""

import os
import secrets
from pathlib import Path

import msgspec

from bus.errors import SettingsError
from launcher.run_dir import user_dir


class CurrentFleet(msgspec.Struct, frozen=True):
    """The fleet that was brought up last."""

    address: str
    """Where clients connect."""
    pid: int
    """Of the process that brought it up."""
    key_file: str = ""
    """What commands connect with; empty if it asks for no keys."""


def announce(fleet: CurrentFleet) -> None:
    """Make this the fleet that commands talk to when they are given no address."""
    path = _path()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    draft.write_bytes(msgspec.json.encode(fleet) + b"\n")
    draft.replace(path)


def withdraw(fleet: CurrentFleet) -> None:
    """The fleet is gone; a newer one's announcement stays."""
    if _read() == fleet:
        _path().unlink(missing_ok=True)


def current_fleet() -> CurrentFleet:
    """The fleet that runs here.

    Raises:
        SettingsError: there is none.
    """
    fleet = _read()
    if fleet is None or not Path(f"/proc/{fleet.pid}").exists():
        raise SettingsError(
            "no fleet of yours runs here: start one with `rolloutbus up`, or say --address"
        )
    return fleet


def this_process(address: str, key_file: str = "") -> CurrentFleet:
    """The announcement of a fleet that this process has brought up."""
    return CurrentFleet(address, os.getpid(), key_file)


def _path() -> Path:
    return user_dir() / "current"


def _read() -> CurrentFleet | None:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=CurrentFleet)
    except (OSError, msgspec.DecodeError):
        return None
