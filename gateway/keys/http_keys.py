"""API keys of HTTP clients, each the right to act as one principal of the bus."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

PREFIX = "rb-"
"""API keys begin with it, so that a leaked one is known for what it is."""
SECRET_BYTES = 32
FILE_MODE = 0o600
MAX_KEYS = 1000
MAX_NAME = 64


class HttpKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key; the key itself is kept nowhere."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    """Whose it is, for people."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of the API key."""
    key_file: str
    """Key file of the principal as whom it acts, relative to the file of API keys. Empty:
    where the router asks for no key."""


def read_http_keys(path: Path) -> list[HttpKey]:
    """Read a file of API keys; their key files are absolute in the result.

    Raises:
        SettingsError: it cannot be read, holds something else, no key, or one key twice.
    """
    held = _read(path)
    if not 1 <= len(held) <= MAX_KEYS:
        raise SettingsError(
            f"API keys: {path} holds {len(held)}; make one with: rolloutbus keys http"
        )
    if len({each.sha256 for each in held}) < len(held):
        raise SettingsError(f"API keys: {path} holds a key twice; it can act as one principal only")
    return [
        msgspec.structs.replace(
            each, key_file=str(path.parent / each.key_file) if each.key_file else ""
        )
        for each in held
    ]


def add_http_key(path: Path, name: str, key_file: Path | None) -> str:
    """Make an API key and note it in a file, which is made if it is not there.

    Args:
        path: of the file of API keys.
        name: whose it is; replaces that of the same name.
        key_file: of the principal as whom it acts.

    Returns:
        The API key. It is told this once.

    Raises:
        SettingsError: the file cannot be read or written.
    """
    if not 1 <= len(name) <= MAX_NAME:
        raise SettingsError(f"API keys: a name has 1 to {MAX_NAME} characters")
    held = _read(path) if path.exists() else []
    others = [each for each in held if each.name != name]
    secret = f"{PREFIX}{secrets.token_urlsafe(SECRET_BYTES)}"
    place = os.path.relpath(key_file, path.parent) if key_file is not None else ""
    try:
        content = msgspec.json.format(
            msgspec.json.encode([*others, HttpKey(name, digest_of(secret), place)])
        )
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        whole.touch(FILE_MODE)
        whole.write_bytes(content)
        whole.replace(path)
    except OSError as error:
        raise SettingsError(f"API keys: cannot write {path}: {error.strerror}") from error
    return secret


def _read(path: Path) -> list[HttpKey]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[HttpKey])
    except OSError as error:
        raise SettingsError(f"API keys: cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"API keys: {path} is no file of API keys: {error}") from error


def digest_of(secret: str) -> str:
    """What is kept of an API key: it has 256 random bits, so one hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def bearer_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The API key in `Authorization: Bearer KEY`; empty if there is none."""
    for name, value in headers:
        kind, _, secret = value.partition(b" ")
        if name.lower() == b"authorization" and kind.lower() == b"bearer":
            return secret.strip().decode("latin-1")
    return ""


def holder_of(secret: str, digests: Iterable[str]) -> str | None:
    """Returns the digest of this API key if it is among `digests`; takes equal time for all."""
    given = digest_of(secret)
    found = None
    for each in digests:
        if hmac.compare_digest(given, each):
            found = each
    return found
