"""Whether somebody listens on an ipc path already."""

import errno
import socket


def is_taken(endpoint: str) -> bool:
    """Whether somebody listens on this ipc path; False for other endpoints.

    libzmq would take the path over without a word, and leave its owner deaf.
    """
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a full backlog is an answer, too
        return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)
