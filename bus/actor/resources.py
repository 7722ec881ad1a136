"""Limits that the system sets on this process: open files, memory, full disks; and its own memory.

A router without descriptors cannot take a connection and cannot refuse it either: libzmq tries
again at once, for ever, on a whole core. So the need is checked at the start, people are warned
while some are left, and the last ones are not for strangers.
"""

import ctypes
import errno
import gc
import resource
from pathlib import Path

from rolloutbus.bus.wire.errors import SettingsError

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEEP_BYTES = 256 * 1024 * 1024
"""Freed memory at the end of a heap that is kept."""
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
"""The most that glibc accepts; larger blocks are mapped and unmapped one by one."""


def keep_freed_memory() -> None:
    """Make malloc keep freed memory; for processes that move weights.

    Does nothing where the C library has no `mallopt`.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def keep_what_is_loaded() -> None:
    """Have Python's collector never look again at what is there now; for processes that serve.

    Once torch and an engine are loaded, a full collection stops everything for 0.4 to 0.6 s.
    Turns the collector on, which a process may leave off while it loads.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when a disk, or a share of it, is full: that may change by itself."""
RESERVE_FDS = 64
"""For logs, ledgers and engine hosts, beside one descriptor per peer."""
ALARM_SHARE = 0.8
WATCH_S = 5.0
"""Between two looks."""
_ALARM_OFF_SHARE = 0.7
"""An alarm is given again after use has fallen below this share."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_CGROUP_KINDS = Path("/sys/fs/cgroup/memory.stat")
_FREE_FOR_OTHERS = "inactive_file"
"""Pages of files that nobody has used lately: the kernel gives them up before it refuses any."""
_OPEN_FDS = Path("/proc/self/fd")


def provide_fds(n_peers: int) -> int:
    """Let this process open what so many peers need, and the reserve; returns its new limit.

    Raises:
        SettingsError: the system does not allow so many.
    """
    needed = n_peers + RESERVE_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SettingsError(
            f"{n_peers} peers need {needed} open files, but the system allows {hard}; "
            f"raise it (`ulimit -Hn {needed}`) or expect fewer peers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed


def too_few_fds() -> str:
    """The sentence for people when no more files can be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} open files, and has them; raise that (`ulimit -n 1064` is "
        "enough for 1000 peers)"
    )


def is_scarce(fd: int) -> bool:
    """Whether a descriptor that was just opened is one of the reserve.

    The lowest free number is always given first, so a number this high says that about as many are
    in use.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and fd >= soft - RESERVE_FDS


class ResourceWatch:
    """Tells once when descriptors or memory grow scarce, and once more after they were not."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._scarce: set[str] = set()

    def look(self, now: float) -> list[str]:
        """A sentence for each limit that has come near since the last look, which may be rare."""
        if now < self._look_at:
            return []
        self._look_at = now + WATCH_S
        return [
            sentence
            for what, used, limit in (_descriptors(), _memory())
            if (sentence := self._judge(what, used, limit))
        ]

    def _judge(self, what: str, used: int, limit: int) -> str:
        share = used / limit if limit > 0 else 0.0
        if share < _ALARM_OFF_SHARE:
            self._scarce.discard(what)
        if share < ALARM_SHARE or what in self._scarce:
            return ""
        self._scarce.add(what)
        return f"{share:.0%} of {what} are in use: {used} of {limit}"


def _descriptors() -> tuple[str, int, int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "open files", 0, 0
    return "open files", sum(1 for _ in _OPEN_FDS.iterdir()), soft


def _memory() -> tuple[str, int, int]:
    """Memory that this control group needs; without a group there is no known limit."""
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
        kinds = dict(line.split() for line in _CGROUP_KINDS.read_text().splitlines())
        used -= int(kinds.get(_FREE_FOR_OTHERS, 0))
    except (OSError, ValueError):
        return "bytes of memory", 0, 0
    return "bytes of memory", used, int(limit) if limit.isdecimal() else 0
