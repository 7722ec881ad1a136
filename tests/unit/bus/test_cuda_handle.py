import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.cuda_memory import BadHandle, CudaHandle, unpack_handle
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
