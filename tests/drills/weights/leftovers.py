"""What a weight plane could leave behind: segments, unfinished files, sockets, processes."""

import contextlib
import os
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from rolloutbus.bus.weights.shm import SHM_DIR

MAX_SEGMENTS = 16
"""Of one store: what it keeps, what it reuses, what is being written."""
MAX_LISTENING = 2
"""Of a trainer that keeps a group: the rendezvous where it was made, and gloo's own."""
_LISTEN = "0A"
_OWNER = re.compile(r'"owner":"([0-9a-f]{16})"')


def owners_in(ledger: Path) -> set[str]:
    """Who owns segments, as a store's ledger tells: one, as long as no other process had it."""
    try:
        return set(_OWNER.findall(ledger.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return set()


def held_by(owners: AbstractSet[str]) -> list[str]:
    """Their segments and locks in shared memory."""
    names = (path.name for path in SHM_DIR.glob("rolloutbus-*"))
    return [name for name in names if name.removesuffix(".lock").split("-")[1] in owners]


def unfinished_files(root: Path, ledger: str) -> list[str]:
    """What a store began to write below `root`; its ledger lies there, too."""
    return [path.name for path in root.glob(".*") if path.name != ledger]


def n_listening(pid: int) -> int:
    """TCP sockets on which a process waits for others."""
    table = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    rows = (line.split() for line in table)
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN}
    return sum(target in listening for target in _fd_targets(pid))


def processes_of(directory: Path) -> list[str]:
    """Command lines of living processes that were told of something in this directory."""
    wanted = os.fsencode(f"{directory}/")  # whoever only asked for this drill says less
    found = _command_lines()
    return [line.replace(b"\0", b" ").decode(errors="replace") for line in found if wanted in line]


def _command_lines() -> Iterable[bytes]:
    """Of all other processes of this machine, some of which end meanwhile."""
    for pid in {each.name for each in Path("/proc").iterdir() if each.name.isdigit()}:
        if pid != str(os.getpid()):
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{pid}/cmdline").read_bytes()


def _fd_targets(pid: int) -> Iterable[str]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(path.readlink())
        except FileNotFoundError:
            continue  # it was closed meanwhile
