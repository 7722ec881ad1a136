"""What `Bucket.handle` holds for `cuda_ipc`: which memory, and whose.

Spec: docs/protocol.md, "Bucket".
"""

from typing import Annotated

import msgspec

from rolloutbus.bus.weights.cuda_memory import HANDLE_BYTES

_MAX_NUMBER = 2**31 - 1
_Number = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)]


class BadHandle(ValueError):
    """Not a handle of GPU memory."""


class CudaHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """GPU memory that another process of this host lends."""

    memory: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    """For `CudaMemory.open`."""
    pid: _Number
    """Of the owner; with `loan` the name of its `bus.loans.Loan`."""
    loan: _Number

    def pack(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)


def unpack_handle(packed: bytes) -> CudaHandle:
    """Check every field.

    Raises:
        BadHandle: says what is wrong.
    """
    try:
        return msgspec.msgpack.decode(packed, type=CudaHandle)
    except msgspec.MsgspecError as error:
        raise BadHandle(f"not a handle of GPU memory: {error}") from error
