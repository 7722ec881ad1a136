"""A place in a trainer's group that cannot be taken, or is lost."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.trainer_adapter.joined_group.member import JoinedGroup
from rolloutbus.trainer_adapter.joined_group.orders import Invitation, Receive

TOO_LONG = "g" * 200_000
"""Linux starts no process with an argument of more than 128 KiB."""
DEADLINE_S = 20.0


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


async def test_a_bucket_of_a_group_whose_process_died_a_moment_ago_is_lost_with_it() -> None:
    invitation = Invitation("died", "127.0.0.1", 9, 1, 2, "gloo", DEADLINE_S)
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *("sleep", "1000"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    told: list[str] = []
    group = JoinedGroup(invitation, process, ours, told.append)
    process.kill()
    ours.settimeout(DEADLINE_S)
    assert ours.recv(1) == b""  # it is dead, but no turn of the loop has heard of that
    with pytest.raises(PeerLost, match="its process is gone"):
        await group.receive(Receive(64, []), DEADLINE_S)
    assert told == ["its process is gone"]
