"""Who started whom, as far as a kill drill needs to know."""

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Process ids of the living children of a process."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def command_of(pid: int) -> list[str]:
    """Its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []
