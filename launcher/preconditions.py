"""What a fleet will listen at and write to, tried before any of its processes is started."""

import os
import secrets
import socket
from pathlib import Path

from rolloutbus.bus.actor.resources import NO_ROOM
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.plan import LEDGER, LOOPBACK
from rolloutbus.launcher.settings import FleetSettings
from rolloutbus.replay.journal.files import check_free
from rolloutbus.trainer_adapter.store import ledger


def check_preconditions(settings: FleetSettings) -> None:
    """Try the gateway's port and the directories of a fleet on this machine; nothing is left there.

    Raises:
        SettingsError: one cannot be had; it names the setting.
    """
    if settings.http:
        _check_port(settings.http)
    for name in ("weights_dir", "record", "journal", "profile_dir"):
        given = getattr(settings, name)
        if given:
            _check_directory(name, Path(given).absolute())
    for journal in filter(None, (settings.record, settings.journal)):
        if Path(journal).is_dir():
            check_free(Path(journal))
    if settings.weights_dir:
        ledger.check_free(Path(settings.weights_dir, LEDGER))


def _check_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        # As the gateway's own, which may follow one that has just ended.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((LOOPBACK, port))
            tried.listen()
        except OSError as error:
            raise SettingsError(
                f"http: cannot listen at {LOOPBACK}:{port}: {error.strerror}"
            ) from error


def _check_directory(name: str, directory: Path) -> None:
    """Try to make something in it, or in the first directory above that is there."""
    # Unlike Path's own, it is false also for what may not be looked at.
    there = next(each for each in (directory, *directory.parents) if os.path.exists(each))  # noqa: PTH110
    if not there.is_dir():
        raise SettingsError(f"{name}: {there} is not a directory")
    tried = there / f".rolloutbus-{secrets.token_hex(4)}"
    try:
        tried.mkdir()
        tried.rmdir()
    except OSError as error:
        if error.errno not in NO_ROOM:  # a full disk may have room when it is written to
            raise SettingsError(f"{name}: cannot write in {there}: {error.strerror}") from error
