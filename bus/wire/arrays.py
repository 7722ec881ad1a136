"""Arrays of numpy to arrays of the wire and back.

numpy has no bfloat16: what comes as such is widened to float32, which is exact.
Spec: docs/protocol.md, "Arrays".
"""

from math import prod
from typing import Any

import numpy as np

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.array import Array, ArrayDtype

AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]

_DTYPES: dict[str, str] = {
    "int32": "<i4",
    "int64": "<i8",
    "float32": "<f4",
    "float16": "<f2",
    "uint8": "|u1",
    "bfloat16": "<u2",
}
"""Ours -> numpy's type of the same size."""


def array_of(values: AnyArray, dtype: ArrayDtype | None = None) -> Array:
    """An array for the wire.

    Args:
        values: [shape], any layout.
        dtype: `bfloat16` if `values` is uint16, the bits of such; else that of `values`.

    Raises:
        ValueError: the wire has no such type, or it is larger than 16 MiB.
    """
    name = dtype or values.dtype.name
    if name not in _DTYPES or np.dtype(_DTYPES[name]).itemsize != values.dtype.itemsize:
        raise ValueError(f"the bus has no arrays of {name} made of {values.dtype.name}")
    if values.nbytes > MAX_PIECE_BYTES:
        raise ValueError(f"an array of {values.nbytes} bytes; at most {MAX_PIECE_BYTES} are sent")
    known: ArrayDtype = name  # type: ignore[assignment] - a key of _DTYPES
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return Array(known, values.shape, data)


def numpy_of(array: Array) -> AnyArray:
    """As numpy has it, [shape], read-only; bfloat16 as float32.

    Raises:
        RemoteProtocolError: its bytes do not fill its shape.
    """
    dtype = np.dtype(_DTYPES[array.dtype])
    if min(array.shape, default=0) < 0 or prod(array.shape) * dtype.itemsize != len(array.data):
        size = len(array.data)
        raise RemoteProtocolError(f"an array {array.dtype} {array.shape} of {size} bytes")
    values = np.frombuffer(array.data, dtype).reshape(array.shape)
    if array.dtype == "bfloat16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
        wide.flags.writeable = False
        return wide
    return values
