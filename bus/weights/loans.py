"""Memory that one process lends to others of its host, and how it learns that nobody reads it.

The owner makes an anonymous file, a borrower takes a shared `flock` of it for as long as it reads,
and the owner writes only under an exclusive one. The kernel lets go of a dead borrower's lock, so
nobody has to be told that a process is gone, and an anonymous file leaves nothing behind.
"""

import fcntl
import os
from pathlib import Path

_FILE_NAME = "rolloutbus-loan"
_LINK = f"/memfd:{_FILE_NAME} (deleted)"


class NotLent(OSError):
    """The owner is gone, is not on this host, or is writing at present."""


class Loan:
    """The owner's side; begins recalled: nobody can borrow before `lend`."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def name(self) -> tuple[int, int]:
        """What `borrow` takes: process id and descriptor."""
        return os.getpid(), self._fd

    def lend(self) -> None:
        """Others may borrow."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def recall(self) -> bool:
        """Whether nobody reads; if so, nobody can until the next `lend`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Nothing is lent any more; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Borrowed:
    """The borrower's side: the owner leaves the memory alone until `give_back`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def give_back(self) -> None:
        """Nobody reads it here any more; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def borrow(pid: int, fd: int) -> Borrowed:
    """Keep the memory behind `Loan.name` as it is.

    Raises:
        NotLent: it cannot be had; the text says why.
    """
    path = Path(f"/proc/{pid:d}/fd/{fd:d}")
    try:
        # Only the link is looked at first: opening somebody else's file could have effects.
        is_loan = str(path.readlink()) == _LINK
        own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_loan else -1
    except OSError as error:
        raise NotLent(f"process {pid} lends nothing to this one: {error.strerror}") from error
    if own_fd < 0:
        raise NotLent(f"descriptor {fd} of process {pid} is not a loan")
    try:
        fcntl.flock(own_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(own_fd)
        raise NotLent("its owner is writing for another version") from error
    return Borrowed(own_fd)
