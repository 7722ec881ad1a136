"""Bytes that lie in files are found there, and no others."""

import gc
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.engine_worker.weights.buffers import FileBytes, Whereabouts, shared_buffer


def read(place: FileBytes, size_bytes: int) -> bytes:
    with Path(place.path).open("rb") as file:
        file.seek(place.offset)
        return file.read(size_bytes)


def n_in_memory() -> int:
    """Files in memory that this process has open; other descriptors come and go."""
    n = 0
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - readlink wants names
        with suppress(FileNotFoundError):
            n += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")  # noqa: PTH115 - no path
    return n


def numbers(size_bytes: int) -> Bytes:
    return (np.arange(size_bytes) % 251).astype(np.uint8)


def test_a_shared_buffer_is_a_file_for_others() -> None:
    buffer = shared_buffer(100_000)
    buffer[:] = numbers(100_000)
    part = buffer[50_001:50_101]
    place = Whereabouts().of(part)
    assert place is not None
    assert read(place, 100) == part.tobytes()


def test_a_mapped_file_is_found_while_only_its_mapping_is_left(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(numbers(20_000).tobytes())
    fd = os.open(path, os.O_RDONLY)
    content = np.frombuffer(mmap.mmap(fd, 20_000, access=mmap.ACCESS_COPY), np.uint8)
    os.close(fd)
    path.unlink()
    place = Whereabouts().of(content[4097:])
    assert place is not None
    assert read(place, 20_000) == content[4097:].tobytes()


def test_memory_of_this_process_is_nowhere_else() -> None:
    assert Whereabouts().of(np.zeros(1_000_000, np.uint8)) is None


def test_a_buffer_without_bytes_is_nowhere() -> None:
    assert Whereabouts().of(shared_buffer(0)) is None


def test_a_shared_buffer_ends_with_its_last_part() -> None:
    gc.collect()  # those that other tests have left
    n_before = n_in_memory()
    part = shared_buffer(1000)[10:20]
    assert n_in_memory() == n_before + 1
    del part
    assert n_in_memory() == n_before
