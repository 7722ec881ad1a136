"""A place in a trainer's group that cannot be taken."""

import contextlib
from pathlib import Path

import pytest

from rolloutbus.trainer_adapter.joined_group.member import JoinedGroup
from rolloutbus.trainer_adapter.joined_group.orders import Invitation

TOO_LONG = "g" * 200_000
"""Linux starts no process with an argument of more than 128 KiB."""


def sockets() -> set[str]:
    """Those that this process has open."""
    found: set[str] = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            found.add(str(each.readlink()))
    return {name for name in found if name.startswith("socket:")}


async def test_a_child_that_cannot_be_started_leaves_no_socket_open() -> None:
    invitation = Invitation(TOO_LONG, "127.0.0.1", 9, 1, 2, "gloo", 1.0)
    before = sockets()
    with pytest.raises(OSError, match="Argument list too long") as caught:
        await JoinedGroup.join(invitation, lambda _: None)
    assert sockets() <= before, caught.value  # which would keep one alive
