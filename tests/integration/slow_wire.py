"""Wires that delay and lose frames, where the kernel has no netem: both ends are TAP devices.

`ip netns exec HUB python -m tests.integration.slow_wire QUALITY NAME…`, with a `Quality` as JSON,
makes the devices NAME and NAME-far for each name, prints a line, and carries frames until it is
killed. A frame that comes out of NAME-far, which is to be a host's own interface, waits and may be
lost; one that goes to it does not, as with netem on what a host sends. Frames keep their order.
The kernel sees real losses: TCP does what it does on a bad line.
"""

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FAR = "-far"
"""Ends the name of the device that a host is to get."""
_FRAME_BYTES = 65_536
_AT_ONCE = 64
"""Frames read from one device before the others get their turn."""


class Wire:
    """One of them."""

    def __init__(self, name: str, delay_s: float, jitter_s: float, loss: float) -> None:
        self.near, self.far = _tap(name), _tap(f"{name}{FAR}")
        """Its ends at the hub and at the host: open devices."""
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._under_way: deque[tuple[float, bytes]] = deque()
        """(when it arrives, frame)."""

    def read(self, device: int) -> None:
        """Take what has come out of one of both ends."""
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(device, _FRAME_BYTES)
            except BlockingIOError:
                return
            if device == self.near:
                _put(self.far, frame)
            elif random.random() >= self._loss:
                self._under_way.append((self._due_at(), frame))

    def deliver(self, now: float) -> float:
        """Put out what has arrived; returns the seconds until the next frame does."""
        while self._under_way and self._under_way[0][0] <= now:
            _put(self.near, self._under_way.popleft()[1])
        return self._under_way[0][0] - now if self._under_way else 1.0

    def _due_at(self) -> float:
        delay_s = random.uniform(self._delay_s - self._jitter_s, self._delay_s + self._jitter_s)
        latest = self._under_way[-1][0] if self._under_way else 0.0
        return max(latest, time.monotonic() + delay_s)


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _put(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:
        return  # that end is down: the frame is lost, as on any wire


def main() -> None:
    """Carry frames."""
    quality: dict[str, float] = json.loads(sys.argv[1])
    in_s = (quality["delay_ms"] / 1e3, quality["jitter_ms"] / 1e3, quality["loss"])
    wires = [Wire(name, *in_s) for name in sys.argv[2:]]
    wire_of = {device: wire for wire in wires for device in (wire.near, wire.far)}
    poll = select.epoll()
    for device in wire_of:
        poll.register(device, select.EPOLLIN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wait_s = 1.0
    while True:
        for device, _ in poll.poll(max(0.0, wait_s)):
            wire_of[device].read(device)
        wait_s = min(wire.deliver(time.monotonic()) for wire in wires)


if __name__ == "__main__":
    main()
