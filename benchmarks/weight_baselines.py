"""Two baselines for weight updates: a copy within memory, and a bare gloo broadcast."""

# pyright: reportUnknownMemberType=false
# The stubs of torch.distributed leave parameters untyped.

import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
BUCKET_BYTES = 256 * 1024 * 1024
TIMEOUT = timedelta(seconds=120)


def memcpy_s(size_bytes: int) -> float:
    """Seconds of one copy of that size, between memory that is already paged in."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


class GlooBroadcast:
    """Rank 0 of a gloo group; the other ranks are processes that only receive."""

    def __init__(self, n_receivers: int, size_bytes: int) -> None:
        self._world = n_receivers + 1
        self._size_bytes = size_bytes
        self._receivers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start the receivers and join them."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(1, self._world):
            arguments = [str(each) for each in (port, rank, self._world, self._size_bytes)]
            command = [sys.executable, "-m", "benchmarks.weight_baselines", *arguments]
            self._receivers.append(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True)
            )
        _join(port, 0, self._world)
        self._content = torch.ones(self._size_bytes, dtype=torch.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        """End the receivers."""
        for each in self._receivers:
            each.kill()
            each.communicate()
        dist.destroy_process_group()

    def seconds(self) -> float:
        """Seconds of one broadcast of the whole model, in buckets."""
        for each in self._receivers:
            assert each.stdin is not None
            each.stdin.write("again\n")
            each.stdin.flush()
        dist.barrier()
        began = time.perf_counter()
        _broadcast(self._content)
        dist.barrier()
        return time.perf_counter() - began


def _join(port: int, rank: int, world: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=TIMEOUT
    )


def _broadcast(content: torch.Tensor) -> None:
    for start in range(0, len(content), BUCKET_BYTES):
        dist.broadcast(content[start : start + BUCKET_BYTES], src=0)


def main() -> None:
    """One receiver: a broadcast for every line that is read."""
    port, rank, world, size_bytes = (int(each) for each in sys.argv[1:])
    _join(port, rank, world)
    content = torch.ones(size_bytes, dtype=torch.uint8)
    for _ in sys.stdin:
        dist.barrier()
        _broadcast(content)
        dist.barrier()


if __name__ == "__main__":
    main()
