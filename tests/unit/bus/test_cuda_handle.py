import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights import cuda_memory
from rolloutbus.bus.weights.cuda_memory import (
    BadHandle,
    CudaError,
    CudaHandle,
    CudaMemory,
    loaded_path,
    unpack_handle,
)
from rolloutbus.bus.wire.limits import MAX_HANDLE_BYTES


@given(st.binary(min_size=64, max_size=64), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_handle_arrives_as_it_was_sent(memory: bytes, pid: int, loan: int) -> None:
    handle = CudaHandle(memory, pid, loan)
    assert unpack_handle(handle.pack()) == handle
    assert len(handle.pack()) < MAX_HANDLE_BYTES


@pytest.mark.parametrize(
    "value",
    [
        [bytes(63), 1, 2],
        [bytes(65), 1, 2],
        [bytes(64), -1, 2],
        [bytes(64), 1, 2**31],
        [bytes(64), 1],
        [bytes(64), 1, 2, 3],
        [bytes(64), "1", 2],
        {"memory": bytes(64), "pid": 1, "loan": 2},
        None,
    ],
)
def test_every_field_of_a_handle_is_checked(value: object) -> None:
    with pytest.raises(BadHandle):
        unpack_handle(msgspec.msgpack.encode(value))


@given(st.binary(max_size=128))
def test_random_bytes_are_no_handle(packed: bytes) -> None:
    with pytest.raises(BadHandle):
        unpack_handle(packed)


def test_without_a_cuda_runtime_there_is_no_gpu_memory() -> None:
    # In a process of its own: where there is a GPU, another test may have loaded one here.
    code = "from rolloutbus.bus.weights.cuda_memory import CudaMemory; CudaMemory()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert "CudaError: libcudart is not loaded" in ended.stderr


def test_a_library_is_found_below_a_directory_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /home/my user/venv/lib/libcudart.so.12\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n"
        "7f04-7f05 rw-p 00000000 00:00 0                          [heap]\n"
    )
    monkeypatch.setattr(cuda_memory, "_MAPS", maps)
    assert loaded_path("libcudart") == "/home/my user/venv/lib/libcudart.so.12"
    with pytest.raises(CudaError, match="libcuda is not loaded"):
        loaded_path("libcuda")
    with pytest.raises(CudaError, match="cannot be loaded"):
        CudaMemory()
