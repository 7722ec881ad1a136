"""Dying with the parent process: nothing that a launcher started may outlive it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies.

    The parent is the thread that started this process: one that ends early counts as dead.

    Args:
        parent: process id that is expected to be the parent now; 0 does not look. (1 is a parent
            like any other: in a container, the launcher's.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the call above: then nobody would ever tell.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
