"""Where requests that killed engines are kept for people: a file of MessagePack maps, one each.

Prompts are private: the file is readable by its owner only. It is never read by the router.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.actor.resources import NO_ROOM
from rolloutbus.bus.wire.entry import NO_BODY
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.router.health.suspicion import DeadLetter

MAX_BODY_BYTES = 1 << 20
"""Bodies above this are left out of the record."""
MAX_FILE_BYTES = 64 << 20
"""At this size nothing is appended any more; whoever reads the file may move it away."""


def check_letters(path: Path) -> None:
    """Make the file, if it is not there.

    Raises:
        SettingsError: it cannot be written, for another reason than a disk that is full now.
    """
    try:
        append_letters(path, [])
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise SettingsError(f"dead_letters: cannot write {path}: {error.strerror}") from error
        warn(f"dead letters will be lost: {path}: {error.strerror}")


def append_letters(path: Path, letters: Iterable[DeadLetter]) -> int:
    """Append to the file, which is made with mode 0600; returns how many had room.

    Raises:
        OSError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    n_kept = 0
    with os.fdopen(descriptor, "ab") as file:
        size_bytes = os.fstat(descriptor).st_size
        for letter in letters:
            body = letter.body if len(letter.body) <= MAX_BODY_BYTES else NO_BODY
            record = msgspec.msgpack.encode(msgspec.structs.replace(letter, body=body))
            if size_bytes + len(record) > MAX_FILE_BYTES:
                break
            file.write(record)
            size_bytes += len(record)
            n_kept += 1
    return n_kept
