"""What processes hold of the machine, and what they hold more of than before."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

MAX_FDS_GROWN = 16
"""Sockets that may still be closing."""
MAX_RSS_GROWN_MIB = 32.0


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Of one process, now."""

    n_fds: int
    rss_mib: float


class Growth(msgspec.Struct, frozen=True):
    """Of that process of one kind that grew most, each measured under the same load."""

    before: Usage
    after: Usage

    @property
    def problem(self) -> str:
        """In words; empty if it is back where it was."""
        if self.after.n_fds > self.before.n_fds + MAX_FDS_GROWN:
            return f"fds grew from {self.before.n_fds} to {self.after.n_fds}"
        if self.after.rss_mib > self.before.rss_mib + MAX_RSS_GROWN_MIB:
            return f"memory grew from {self.before.rss_mib} to {self.after.rss_mib} MiB"
        return ""


def usages_of(pids: Mapping[str, int]) -> dict[str, Usage]:
    """Usage by name of those that run."""
    found = {name: _usage_of(pid) for name, pid in pids.items() if pid}
    return {name: usage for name, usage in found.items() if usage is not None}


def growths(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> dict[str, Growth]:
    """By kind of process: its name without what follows the number or the dash."""
    worst: dict[str, Growth] = {}
    for name in sorted(before.keys() & after.keys()):
        growth = Growth(before[name], after[name])
        known = worst.setdefault(_kind_of(name), growth)
        if _grown_by(growth) > _grown_by(known):
            worst[_kind_of(name)] = growth
    return worst


def _grown_by(growth: Growth) -> float:
    """Comparable share of what is allowed."""
    fds = (growth.after.n_fds - growth.before.n_fds) / MAX_FDS_GROWN
    return max(fds, (growth.after.rss_mib - growth.before.rss_mib) / MAX_RSS_GROWN_MIB)


def _kind_of(name: str) -> str:
    if name.startswith("w") and name[1:2].isdigit():
        return "host" if name.endswith(".host") else "worker"
    return name.partition("-")[0]


def _usage_of(pid: int) -> Usage | None:
    try:
        n_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    [kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    return Usage(n_fds, round(kib / 1024, 1))
