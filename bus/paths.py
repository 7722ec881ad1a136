"""Files that a peer names: opened under the operator's roots only, never through a link.

Each component is opened by itself, relative to the one before and without following links, so
nothing that is renamed or linked meanwhile leads outside. A name is never an address of the web
nor of a model hub. Spec: docs/protocol.md, "Security".
"""

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem

MAX_PATH_BYTES = 1024
MAX_DEPTH = 16
MAX_COMPONENT_BYTES = 255
WEIGHTS = frozenset({".safetensors"})

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe without O_NONBLOCK would wait for its other end.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FileRules:
    """Files that an operator lets peers name."""

    roots: tuple[Path, ...]
    """Directories, searched in order; these themselves may be links."""
    suffixes: frozenset[str] = WEIGHTS
    max_bytes: int = 1 << 40


def open_named(name: str, rules: FileRules, *, field: str = "path") -> int:
    """Descriptor, read-only, of the file that a peer named; the caller closes it.

    Raises:
        Refused: the name breaks a rule, or no root has such a file; `field` is the problem's.
    """
    problem = check_path(name, rules.suffixes, field=field)
    if problem is not None:
        raise Refused(problem)
    parts = name.split("/")
    why = "no root is configured"
    for root in rules.roots:
        try:
            return _open_under(root, parts, rules.max_bytes)
        except OSError as error:
            why = error.strerror or str(error)
    raise Refused(_problem(field, f"{name[:80]!r} cannot be opened: {why}"))


def named_directory(name: str, root: Path, files: Collection[str], *, field: str = "path") -> Path:
    """Path of the directory that a peer named, in which these files lie and nothing else is linked.

    For those who want a path, not a descriptor: the operator keeps others from writing there.

    Raises:
        Refused: the name breaks a rule, or there is no such directory with such files.
    """
    problem = _check_plain(name, field)
    if problem is not None:
        raise Refused(problem)
    for each in sorted(files):
        try:
            os.close(_open_under(root, [*name.split("/"), each], FileRules((root,)).max_bytes))
        except OSError as error:
            why = error.strerror or str(error)
            raise Refused(_problem(field, f"{name[:80]!r} has no {each}: {why}")) from error
    return root / name


def below(name: str, root: Path, *, field: str = "path") -> str:
    """The name relative to the root, as those who open it want it; an absolute one must lie below.

    Raises:
        Refused: it lies elsewhere; `field` is the problem's.
    """
    if not name.startswith("/"):
        return name.rstrip("/")
    try:
        return str(Path(name).relative_to(root))
    except ValueError as error:
        message = f"{name[:200]!r} does not lie below the root that the operator allows"
        raise Refused(_problem(field, message)) from error


def check_path(name: str, suffixes: frozenset[str], *, field: str = "path") -> Problem | None:
    """Why this text cannot name a file below a root; None if it can."""
    problem = _check_plain(name, field)
    if problem is not None:
        return problem
    last = name.rpartition("/")[2]
    if os.path.splitext(last)[1] not in suffixes:  # noqa: PTH122 - a name, not yet a path
        return _problem(field, f"{name[:80]!r} does not end in {' or '.join(sorted(suffixes))}")
    return None


def _check_plain(name: str, field: str) -> Problem | None:
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        return _problem(field, "a path is UTF-8")
    if not 0 < len(raw) <= MAX_PATH_BYTES:
        return _problem(field, f"a path has 1 to {MAX_PATH_BYTES} bytes, not {len(raw)}")
    parts = name.split("/")
    is_plain = name.isprintable() and "\\" not in name and ":" not in name
    if not is_plain or any(_is_special(part) for part in parts) or len(parts) > MAX_DEPTH:
        return _problem(
            field,
            f"{name[:80]!r} is not a relative path of plain names, at most {MAX_DEPTH} deep; "
            "addresses, `..` and links are not followed",
        )
    return None


def _is_special(part: str) -> bool:
    return part in ("", ".", "..") or len(part.encode()) > MAX_COMPONENT_BYTES


def _open_under(root: Path, parts: list[str], max_bytes: int) -> int:
    """Walk down from the root.

    Raises:
        OSError: there is no such file, or it is none that may be read.
    """
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inside = os.open(part, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = inside
        fd = os.open(parts[-1], _FILE, dir_fd=at)
    finally:
        os.close(at)
    why = _why_unfit(os.fstat(fd), max_bytes)
    if why:
        os.close(fd)
        raise OSError(0, why)
    return fd


def _why_unfit(status: os.stat_result, max_bytes: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if status.st_size > max_bytes:
        return f"it has {status.st_size} bytes; at most {max_bytes} are allowed"
    return ""


def _problem(field: str, message: str) -> Problem:
    return Problem("bad_request", message, "not_started", field)
