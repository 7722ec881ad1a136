# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rolloutbus.bus.weights.manifest import Bytes, bytes_of, lay_out, total_bytes
from rolloutbus.bus.weights.tensor_files import (
    header_bytes,
    header_of,
    parse_header,
    read_shards,
    shard_name,
    shards,
)
from rolloutbus.bus.wire.errors import RemoteProtocolError

LAYOUT = lay_out(
    [("a", "F32", (3, 5)), ("b", "U8", (7,)), ("none", "F16", (0, 2)), ("c", "F64", ())]
)
SIZE_BYTES = total_bytes(LAYOUT)


def write(directory: Path, content: Bytes, max_bytes: int = 64) -> None:
    for number, some in enumerate(shards(LAYOUT, max_bytes), start=1):
        pieces = [header_of(some), *(bytes_of(content, each).tobytes() for each in some)]
        (directory / shard_name(number)).write_bytes(b"".join(pieces))


def read(directory: Path) -> Bytes:
    content = np.zeros(SIZE_BYTES, np.uint8)
    read_shards(lambda name: os.open(directory / name, os.O_RDONLY), LAYOUT, content)
    return content


def tensors_of(content: Bytes) -> list[bytes]:
    return [bytes_of(content, each).tobytes() for each in LAYOUT]


@pytest.fixture
def content(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SIZE_BYTES, np.uint8)


@pytest.mark.parametrize(("max_bytes", "n_files"), [(10**6, 1), (64, 2), (1, 4)])
def test_what_is_written_in_several_files_is_read_back(
    tmp_path: Path, content: Bytes, max_bytes: int, n_files: int
) -> None:
    write(tmp_path, content, max_bytes)
    assert len(list(tmp_path.iterdir())) == n_files
    assert tensors_of(read(tmp_path)) == tensors_of(content)


def test_the_safetensors_package_reads_our_files(tmp_path: Path, content: Bytes) -> None:
    write(tmp_path, content, 10**6)
    loaded = load_file(tmp_path / shard_name(1))
    assert {name: each.shape for name, each in loaded.items()} == {
        each.name: each.shape for each in LAYOUT
    }
    assert loaded["a"].tobytes() == bytes_of(content, LAYOUT[0]).tobytes()


def test_files_of_the_safetensors_package_are_read(tmp_path: Path, content: Bytes) -> None:
    arrays = {
        "a": bytes_of(content, LAYOUT[0]).view(np.float32).reshape(3, 5),
        "b": bytes_of(content, LAYOUT[1]),
        "none": np.zeros((0, 2), np.float16),
        "c": bytes_of(content, LAYOUT[3]).view(np.float64).reshape(()),
    }
    save_file(arrays, tmp_path / shard_name(1), metadata={"format": "np"})
    assert tensors_of(read(tmp_path)) == tensors_of(content)


def test_a_file_that_ends_early_is_refused(tmp_path: Path, content: Bytes) -> None:
    write(tmp_path, content, 10**6)
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RemoteProtocolError):
        read(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, content: Bytes) -> None:
    other = lay_out([("a", "F32", (5, 3))])
    (tmp_path / shard_name(1)).write_bytes(header_of(other) + content[:60].tobytes())
    with pytest.raises(RemoteProtocolError, match="'a'"):
        read(tmp_path)


def test_missing_tensors_are_not_looked_for_in_files_that_have_none(
    tmp_path: Path, content: Bytes
) -> None:
    write(tmp_path, content)
    (tmp_path / shard_name(2)).write_bytes(header_of([]))
    with pytest.raises(RemoteProtocolError, match="none of the"):
        read(tmp_path)


@pytest.mark.parametrize("length", [b"", b"\x01" * 7, bytes(8), b"\xff" * 8])
def test_impossible_lengths_of_a_header_are_refused(length: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        header_bytes(length)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}}',
        b'{"a": {"dtype": "what", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_that_point_nowhere_are_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_header(text, 8 + len(text) + 4)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_header_is_read_or_refused(text: bytes, file_bytes: int) -> None:
    try:
        ranges = parse_header(text, file_bytes)
    except RemoteProtocolError:
        return
    assert all(
        0 <= each.start <= each.start + each.size_bytes <= file_bytes for each in ranges.values()
    )
