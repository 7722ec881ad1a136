"""Which addresses are used already, and which ipc paths others could reach."""

import socket
from pathlib import Path

import pytest

from rolloutbus.bus.transport.zmq_sockets import is_taken, require_private_dir
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.errors import SettingsError


def test_a_path_with_a_listener_is_taken_and_what_a_dead_one_left_is_not(tmp_path: Path) -> None:
    path = tmp_path / "front"
    assert not is_taken(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        assert is_taken(f"ipc://{path}")
    assert path.exists()
    assert not is_taken(f"ipc://{path}")


def test_tcp_is_left_to_the_bind_itself() -> None:
    assert not is_taken("tcp://127.0.0.1:1")


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_ipc_path_in_a_directory_that_others_may_enter_is_refused(
    tmp_path: Path, mode: int
) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir(0o700)
    endpoint = f"ipc://{directory}/router"
    require_private_dir(endpoint)
    directory.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 700"):
        require_private_dir(endpoint)


def test_ipc_path_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        require_private_dir(f"ipc://{tmp_path}/missing/router")


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_an_address_can_be_used_again_at_once_by_who_has_let_go_of_it(
    tmp_path: Path, scheme: str
) -> None:
    first = PubPort(f"ipc://{tmp_path}/out" if scheme == "ipc" else "tcp://127.0.0.1:0")
    endpoint = first.endpoint
    first.close()
    for _ in range(100):
        PubPort(endpoint).close()
