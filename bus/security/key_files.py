"""Files of keys: key pairs, which only their user can read, public keys, and the allow-list.

Nothing is overwritten but in one piece, and nothing is trusted that others could have changed.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rolloutbus.bus.security.invites import KeyList
from rolloutbus.bus.security.keys import KEY_BYTES, KeyPair, check_public_key, is_public_key
from rolloutbus.bus.security.principals import Principal, Principals, by_key
from rolloutbus.bus.wire.errors import SettingsError

MAX_KEY_FILE_BYTES = 4096
MAX_LIST_BYTES = 16 * 1024 * 1024
ROUTER_ADDRESSES = "router.json"
SECRET_MODE = 0o600
PUBLIC_MODE = 0o644
OTHERS = 0o077
"""Permissions of the group and of everybody else."""
OTHERS_MAY_WRITE = 0o022
_DESCRIPTOR = re.compile(r"fd:(\d{1,9})")
"""In the place of a path: an open descriptor of this process, whose content is on no disk."""


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"_KeyFile({self.name!r})"


class RouterAddresses(msgspec.Struct, frozen=True):
    """Where a router listens, for those who find its public key in the same directory."""

    frontend: str = ""
    """For clients; of a router and its standby both, separated by a comma."""
    backend: str = ""
    """For workers and the store, likewise; a router that was started by hand does not know that of
    its standby."""

    @property
    def lacks_a_backend(self) -> bool:
        """Whether a worker that goes by this would not find the standby."""
        return bool(self.backend) and self.frontend.count(",") > self.backend.count(",")


def public_file(path: Path) -> Path:
    """Path of the public half of a key file, to be given to others."""
    return path.with_name(f"{path.name.removesuffix('.key')}.pub")


def is_there(path: Path) -> bool:
    """Whether there is such a file or directory.

    Raises:
        SettingsError: this user may not look.
    """
    try:
        return path.exists()
    except OSError as error:
        raise SettingsError(f"cannot look for {path}: {error.strerror}") from error


def router_key_beside(path: str | Path) -> str:
    """Path of the router's public key file in the same directory; empty if there is none.

    Raises:
        SettingsError: this user may not look into the directory.
    """
    if _DESCRIPTOR.fullmatch(os.fspath(path)):
        return ""
    file = Path(path).absolute().with_name("router.pub")
    return str(file) if is_there(file) else ""


def write_router_addresses(directory: Path, addresses: RouterAddresses) -> None:
    """Keep them beside the router's public key.

    Raises:
        OSError: the directory cannot be written.
    """
    _replace(directory / ROUTER_ADDRESSES, msgspec.json.encode(addresses) + b"\n")


def router_addresses_beside(path: str | Path) -> RouterAddresses:
    """Where the router of the keys in this file's directory listens; empty ones if nothing says so.

    Raises:
        SettingsError: the file is no such file, or others may write it.
    """
    file = Path(path).absolute().with_name(ROUTER_ADDRESSES)
    if not is_there(file):
        return RouterAddresses()
    try:
        return msgspec.json.decode(_trusted_content(file, MAX_KEY_FILE_BYTES), type=RouterAddresses)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{file}: {error}") from error


def write_key_pair(path: Path, pair: KeyPair) -> None:
    """Keep a pair in a new file of mode 0600, and its public half beside it.

    Raises:
        SettingsError: a file is there already, or the directory cannot be written.
    """
    content = msgspec.json.encode(_KeyFile(pair.name, pair.public, pair.reveal().hex()))
    try:
        _write_new(path, content + b"\n", SECRET_MODE)
    except FileExistsError:
        raise SettingsError(f"{path} exists already: keys are never overwritten") from None
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a convenience; `keys show` tells it as well
        write_public_key(public_file(path), pair.public)


def remove_key_pair(path: Path) -> None:
    """Undo `write_key_pair`."""
    path.unlink()
    public_file(path).unlink(missing_ok=True)


def write_public_key(path: Path, key: str) -> None:
    """Keep a public key in a file that only this user may change, in one piece.

    Raises:
        OSError: the directory cannot be written.
    """
    _replace(path, f"{key}\n".encode("ascii"))


def read_public_key(path: str | Path) -> str:
    """The key in a file that only this user or root could have changed.

    Raises:
        SettingsError: it cannot be read, holds no key, or others may write it.
    """
    content = _trusted_content(Path(path), MAX_KEY_FILE_BYTES)
    return check_public_key(content.decode("ascii", "replace").strip())


def in_memory(content: bytes) -> str:
    """Name for a key file that is in this process's memory, and goes with it; for `key_file`."""
    descriptor = os.memfd_create("rolloutbus-key", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return f"fd:{descriptor}"


def for_other_process(key_file: str) -> str:
    """The absolute path of a key file.

    Raises:
        SettingsError: it is in this process's memory.
    """
    if _DESCRIPTOR.fullmatch(key_file):
        raise SettingsError("the key is in this process's memory: pass on the fleet's ticket")
    return os.path.abspath(key_file)  # noqa: PTH100 - as the client was told, links and all


def read_key_pair(path: str | Path) -> KeyPair:
    """The pair of a key file that is this user's alone.

    Args:
        path: of the file, or the name that `in_memory` gave.

    Raises:
        SettingsError: it cannot be read, is no key file, or others could read it, too.
    """
    return _pair_in(_secret_content(path), path)


def _secret_content(path: str | Path) -> bytes:
    """Content of a file that is this user's alone."""
    if found := _DESCRIPTOR.fullmatch(os.fspath(path)):
        try:
            return os.pread(int(found[1]), MAX_KEY_FILE_BYTES, 0)
        except OSError as error:
            raise SettingsError(f"cannot read the key {path}: {error.strerror}") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(f"cannot read the key file {path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SettingsError(f"{path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise SettingsError(f"the key file {path} belongs to another user")
        content = os.pread(descriptor, MAX_KEY_FILE_BYTES, 0)
    finally:
        os.close(descriptor)
    if found.st_mode & OTHERS:
        _pair_in(content, path)  # of what is no key, the mode is no matter
        mode = stat.S_IMODE(found.st_mode)
        raise SettingsError(
            f"the key file {path} has mode {mode:04o}, so that others may use it: "
            "chmod 600 it, or make a new key if others could read it"
        )
    return content


def _pair_in(content: bytes, path: str | Path) -> KeyPair:
    try:
        held = msgspec.json.decode(content, type=_KeyFile)
        secret = bytes.fromhex(held.secret)
        if len(secret) == KEY_BYTES and is_public_key(held.public):
            return KeyPair(held.name, held.public, secret)
    except ValueError:  # it is left out of the sentence: it may quote the secret
        pass
    raise SettingsError(f"{path} is no key file; make one with `rolloutbus keys new`")


class AllowList:
    """The principals that may come in, by public key: reads its file again when it has changed."""

    def __init__(self, path: str | Path) -> None:
        """Read it.

        Raises:
            SettingsError: it cannot be read, says nonsense, or others may write it.
        """
        self._path = Path(path)
        self._seen = self._stamp()
        self._broken: tuple[int, int, int] | None = None
        """Stamp of the file when it could not be used: it is not read again before it changes."""
        self.principals: Principals = _let_in(read_key_list(self._path))
        """Public key -> whose it is; those of invitations stand for newcomers."""
        self.problem = ""
        """Why the file as it is now is not used; then the last good one still holds."""

    def refresh(self) -> bool:
        """Look at the file; True if it says something new."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                self.problem = ""
                return False
            if stamp == self._broken:
                return False
            self._broken = stamp
            principals = _let_in(read_key_list(self._path))
        except SettingsError as error:
            self.problem = str(error)
            return False
        self._seen, self._broken, self.problem = stamp, None, ""
        has_changed = principals != self.principals
        self.principals = principals
        return has_changed

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise SettingsError(f"cannot read {self._path}: {error.strerror}") from error
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_allow_list(path: Path) -> list[Principal]:
    """The principals in an allow-list; raises as `read_key_list`."""
    return read_key_list(path).principals


def read_key_list(path: Path) -> KeyList:
    """Principals and invitations in an allow-list.

    Raises:
        SettingsError: it cannot be read, says nonsense, or others may write it.
    """
    content = _trusted_content(path, MAX_LIST_BYTES)
    try:
        return msgspec.json.decode(content, type=KeyList)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: {error}") from error


def edit_allow_list(path: Path, edit: Callable[[list[Principal]], Sequence[Principal]]) -> None:
    """Change the principals of the file as `edit_key_list` does, and leave the invitations."""

    def edited(listed: KeyList) -> KeyList:
        return msgspec.structs.replace(listed, principals=list(edit(listed.principals)))

    edit_key_list(path, edited)


def edit_key_list(path: Path, edit: Callable[[KeyList], KeyList], *, waits: bool = True) -> KeyList:
    """Change the file in one piece, made if needed: readers see the old list or the new one.

    What `edit` raises leaves it as it was.

    Args:
        path: the file.
        edit: makes the new list of the old one.
        waits: while another process edits it, which may be stopped.

    Returns:
        The new list.

    Raises:
        BlockingIOError: another process edits it; only if this one does not wait.
        SettingsError: what comes out is no list that could be used; nothing has changed.
    """
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: there is no directory {path.parent}: make it first")
    try:
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        listed = read_key_list(path) if is_there(path) else None
        edited = edit(listed or KeyList())
        if edited != listed:
            _let_in(edited)
            content = msgspec.json.format(msgspec.json.encode(edited), indent=2) + b"\n"
            if len(content) > MAX_LIST_BYTES:
                raise SettingsError(f"{path} would be larger than {MAX_LIST_BYTES} bytes")
            _replace(path, content)
        return edited
    except BlockingIOError:
        raise
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(lock)


def _let_in(listed: KeyList) -> Principals:
    """Public key -> whose it is, newcomers among them.

    Raises:
        SettingsError: this is no list that could be used.
    """
    table = by_key(listed.principals)
    for each in listed.invites:
        if each.key in table:
            raise SettingsError(f"the invitation of {each.name} has a key that is let in")
        table[each.key] = Principal(each.key, each.name, "newcomer")
    return table


def _trusted_content(path: Path, max_bytes: int) -> bytes:
    """Content of a file that only this user or root could have changed."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & OTHERS_MAY_WRITE:
                raise SettingsError(f"{path}: only this user or root may be able to write it")
            return file.read(max_bytes)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Nothing is left of it if it cannot be written: a part of a key would pass for a key file."""
    # O_EXCL: neither an existing key nor a link that somebody laid there is written through.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _write_new(draft, content, PUBLIC_MODE)
    try:
        draft.replace(path)
    except BaseException:
        draft.unlink()
        raise
