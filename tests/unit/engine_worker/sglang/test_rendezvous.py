"""Engines that start at once on one host never listen at one port."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutbus.engine_worker.engines.sglang.rendezvous import (
    HIGHEST,
    LOWEST,
    RendezvousPort,
    settled_ports,
)

HOLDER = (
    "import sys\n"
    "from rolloutbus.engine_worker.engines.sglang.rendezvous import RendezvousPort\n"
    "port = RendezvousPort([int(sys.argv[1])])\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def two() -> list[int]:
    """Two ports that nobody listens at now."""
    held = [RendezvousPort(), RendezvousPort()]
    for port in held:
        port.close()
    return [port.number for port in held]


def test_a_port_that_another_engine_has_but_does_not_listen_at_is_not_taken(two: list[int]) -> None:
    command = [sys.executable, "-c", HOLDER, str(two[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        mine = RendezvousPort(two)
        assert mine.number == two[1]
        other.kill()
        other.wait(240)
    after = RendezvousPort(two)  # that engine has ended, and with it its claim
    assert after.number == two[0]
    mine.close()
    after.close()


def test_a_port_that_somebody_listens_at_is_not_taken(two: list[int]) -> None:
    with socket.create_server(("", two[0])):
        port = RendezvousPort(two)
        assert port.number == two[1]
        port.close()


def test_without_a_free_port_it_says_which_argument_names_one(two: list[int]) -> None:
    with socket.create_server(("", two[0])), pytest.raises(OSError, match="nccl_port"):
        RendezvousPort([two[0]])


@pytest.mark.parametrize(
    ("told", "ports"),
    [
        ("32768\t60999\n", range(LOWEST, 32768)),
        ("15000 61000", range(61001, HIGHEST + 1)),
        ("1024 65535", range(LOWEST, HIGHEST + 1)),
        ("what?", range(LOWEST, HIGHEST + 1)),
    ],
)
def test_ports_are_those_that_the_kernel_gives_to_nobody(
    tmp_path: Path, told: str, ports: range
) -> None:
    ephemeral = tmp_path / "ip_local_port_range"
    ephemeral.write_text(told)
    assert settled_ports(ephemeral) == ports
    assert settled_ports(tmp_path / "nowhere") == range(LOWEST, HIGHEST + 1)
