"""Which addresses are used already."""

import socket
from pathlib import Path

from bus.ipc_paths import is_taken


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
