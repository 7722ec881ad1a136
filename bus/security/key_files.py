"""Key pairs on disk: made once, never overwritten, read only where nobody else can."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

import msgspec

from rolloutbus.bus.security.keys import KEY_BYTES, KeyPair, check_public_key, is_public_key
from rolloutbus.bus.wire.errors import SettingsError

MAX_FILE_BYTES = 4096
SECRET_MODE = 0o600
PUBLIC_MODE = 0o644
OTHERS = 0o077
"""Permissions of the group and of everybody else."""
OTHERS_MAY_WRITE = 0o022


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"_KeyFile({self.name!r})"


def public_file(path: Path) -> Path:
    """Where the public half of a key file lies, to be given to others."""
    return path.with_name(f"{path.name.removesuffix('.key')}.pub")


def router_key_beside(path: str | Path) -> str:
    """The public file of a router whose key lies beside this one; empty if there is none."""
    file = Path(path).absolute().with_name("router.pub")
    return str(file) if file.exists() else ""


def write_key_pair(path: Path, pair: KeyPair) -> None:
    """Keep a pair in a new file of mode 0600, and its public half beside it.

    Raises:
        SettingsError: a file is there already, or the directory cannot be written.
    """
    content = msgspec.json.encode(_KeyFile(pair.name, pair.public, pair.reveal().hex()))
    try:
        # O_EXCL: neither an existing key nor a link that somebody laid there is written through.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, SECRET_MODE)
    except FileExistsError:
        raise SettingsError(f"{path} exists already: keys are never overwritten") from None
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(content + b"\n")
        file.flush()
        os.fsync(descriptor)
    with contextlib.suppress(OSError):  # a convenience; `keys show` tells it as well
        write_public_key(public_file(path), pair.public)


def write_public_key(path: Path, key: str) -> None:
    """Keep a public key in a file that only this user may change, in one piece.

    Raises:
        OSError: the directory cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PUBLIC_MODE)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(f"{key}\n".encode("ascii"))
    draft.replace(path)


def read_public_key(path: str | Path) -> str:
    """The key in a file that nobody else could have changed.

    Raises:
        SettingsError: it cannot be read, holds no key, or others may write it.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & OTHERS_MAY_WRITE:
        raise SettingsError(f"{path}: only this user or root may be able to write it")
    return check_public_key(content.decode("ascii", "replace").strip())


def read_key_pair(path: str | Path) -> KeyPair:
    """The pair of a key file that is this user's alone.

    Raises:
        SettingsError: it cannot be read, is no key file, or others could read it, too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(f"cannot read the key file {path}: {error.strerror}") from error
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SettingsError(f"{path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise SettingsError(f"the key file {path} belongs to another user")
        if found.st_mode & OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise SettingsError(
                f"the key file {path} has mode {mode:04o}, so that others may use it: "
                "chmod 600 it, or make a new key if others could read it"
            )
        content = file.read(MAX_FILE_BYTES)
    return _parsed(path, content)


def _parsed(path: str | Path, content: bytes) -> KeyPair:
    try:
        held = msgspec.json.decode(content, type=_KeyFile)
        secret = bytes.fromhex(held.secret)
    except ValueError:
        # Without its cause: that one may quote the secret.
        raise SettingsError(f"{path} is no key file; make one with `rolloutbus keys new`") from None
    if len(secret) != KEY_BYTES or not is_public_key(held.public):
        raise SettingsError(f"{path} is no key file; make one with `rolloutbus keys new`")
    return KeyPair(held.name, held.public, secret)
