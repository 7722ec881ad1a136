"""Keeping freed memory in the process: what moves megabytes all day must not fault them in anew.

glibc gives large freed blocks back to the system and takes fresh pages for the next one; with
chunks of 4 MiB those page faults cost several times the transfer itself.
"""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEEP_BYTES = 256 * 1024 * 1024
"""Freed memory at the end of a heap that is kept."""
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
"""The most that glibc accepts; larger blocks are mapped and unmapped one by one."""


def keep_freed_memory() -> None:
    """Tune malloc for the whole process; for processes of ours that move weights.

    Does nothing where the C library has no `mallopt`.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
