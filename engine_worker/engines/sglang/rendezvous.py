"""The port at which SGLang's scheduler processes meet, unlike that of any other engine here.

SGLang 0.5.17 asks the kernel for a free port, gives it back, and listens there seconds later. In
between anybody may be given the same one, another engine that starts on this host above all.
"""

import random
import socket
from collections.abc import Iterable
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the kernel gives to whoever asks for any."""
LOWEST, HIGHEST = 20_000, 65_535
"""Below them are the ports that well-known services choose."""


class RendezvousPort:
    """A free TCP port that no other `RendezvousPort` of this host has until `close`."""

    def __init__(self, candidates: Iterable[int] | None = None) -> None:
        """Take the first of `candidates` that is free.

        Args:
            candidates: ports to try; None: those that the kernel gives to nobody, in any order.

        Raises:
            OSError: none of them is free.
        """
        for port in _any_order(settled_ports()) if candidates is None else candidates:
            claim = _claim(port)
            if claim is not None:
                self.number, self._claim = port, claim
                return
        raise OSError("no port is free for SGLang's schedulers to meet at; name one as nccl_port")

    def close(self) -> None:
        """Let others have it; a process that ends does so, too."""
        self._claim.close()


def settled_ports(ephemeral: Path = EPHEMERAL) -> range:
    """Returns the ports outside the ephemeral range; all from `LOWEST` on if there are none."""
    try:
        first, last = (int(word) for word in ephemeral.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return range(LOWEST, HIGHEST + 1)
    sides = range(LOWEST, first), range(max(LOWEST, last + 1), HIGHEST + 1)
    return max(sides, key=len) or range(LOWEST, HIGHEST + 1)


def _any_order(ports: range) -> list[int]:
    return random.sample(ports, len(ports))


def _claim(port: int) -> socket.socket | None:
    """The name that stands for this port among engines; None: the port or its name is taken."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Abstract names are those of one network namespace, as ports are, and end with the process.
        claim.bind(f"\0rolloutbus-rendezvous-{port}")
        socket.create_server(("", port)).close()
    except OSError:
        claim.close()
        return None
    return claim
