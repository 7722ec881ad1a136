"""Connections by descriptor: ended if they are what they were, and nothing else is."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutbus.bus.transport.zmq_sockets import Wire, hang_up

pytestmark = pytest.mark.integration


def wire(fd: int) -> Wire:
    return Wire(fd, os.fstat(fd).st_ino)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_connection_is_ended_and_its_descriptor_left_alone(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as peer:
        accepted, _ = listener.accept()
        with accepted:
            assert hang_up(wire(accepted.fileno()))
            assert peer.recv(1) == b""
            assert accepted.fileno() >= 0
            os.fstat(accepted.fileno())


def test_a_later_owner_of_the_descriptor_is_spared(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as peer:
        accepted, _ = listener.accept()
        with accepted:
            before = wire(accepted.fileno())
            assert not hang_up(before._replace(inode=before.inode + 1))
            accepted.send(b"x")
            assert peer.recv(1) == b"x"
        assert not hang_up(before)


def test_what_listens_and_what_is_no_connection_is_spared(
    listener: socket.socket, tmp_path: Path
) -> None:
    assert not hang_up(wire(listener.fileno()))
    with (tmp_path / "file").open("wb") as file:
        assert not hang_up(wire(file.fileno()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not hang_up(wire(ours.fileno()))
    socket.create_connection(listener.getsockname()).close()
