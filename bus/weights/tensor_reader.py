"""Reading a version's tensors from safetensors files into one buffer."""

import os
from collections.abc import Callable, Mapping, Sequence

from rolloutbus.bus.weights.manifest import Bytes, bytes_of
from rolloutbus.bus.weights.tensor_files import (
    LENGTH_BYTES,
    FileRange,
    header_bytes,
    parse_header,
    shard_name,
)
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import Tensor


def read_shards(
    open_shard: Callable[[str], int], tensors: Sequence[Tensor], content: Bytes
) -> None:
    """Fill `content` with the bytes of all tensors; their digests are not verified.

    Args:
        open_shard: file name -> descriptor, which is closed here.
        tensors: what the files must hold, and where it belongs in `content`.
        content: uint8 [at least the size of the version].

    Raises:
        RemoteProtocolError: the files do not hold these tensors.
        OSError: the disk failed.
    """
    missing = {each.name: each for each in tensors}
    number = 1
    while missing:
        name = shard_name(number)
        fd = open_shard(name)
        try:
            found = _read_file(fd, missing, content)
        finally:
            os.close(fd)
        if not found:
            raise RemoteProtocolError(f"{name} holds none of the {len(missing)} missing tensors")
        for each in found:
            del missing[each]
        number += 1


def _read_file(fd: int, wanted: Mapping[str, Tensor], content: Bytes) -> list[str]:
    length = header_bytes(os.pread(fd, LENGTH_BYTES, 0))
    ranges = parse_header(os.pread(fd, length, LENGTH_BYTES), os.fstat(fd).st_size)
    found = [name for name in ranges if name in wanted]
    for name in found:
        _read_tensor(fd, ranges[name], wanted[name], content)
    return found


def _read_tensor(fd: int, where: FileRange, tensor: Tensor, content: Bytes) -> None:
    if (where.dtype, where.shape, where.size_bytes) != (
        tensor.dtype,
        tensor.shape,
        tensor.size_bytes,
    ):
        raise RemoteProtocolError(f"tensor {tensor.name!r} is another one in its file")
    place = bytes_of(content, tensor).data
    n_read = 0
    while n_read < len(place):
        n_new = os.preadv(fd, [place[n_read:]], where.start + n_read)
        if not n_new:
            raise RemoteProtocolError(f"the file of tensor {tensor.name!r} ends early")
        n_read += n_new
