"""GPU memory that one process lends to others of its host: calls of the CUDA runtime, and loans.

PyTorch counts the readers of shared memory in a file whose name travels with the handle, and memory
whose readers died is never free again. Here a handle is what the driver makes of an allocation: 64
bytes. Everything acts on the thread's current device.
"""

import ctypes
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

_FILE_NAME = "rolloutbus-loan"
_LINK = f"/memfd:{_FILE_NAME} (deleted)"


class NotLent(OSError):
    """The owner is gone, is not on this host, or is writing at present."""


class Loan:
    """The owner's side, an anonymous file; nothing can be borrowed before `lend`.

    A borrower holds a shared `flock` of the file while it reads; the owner writes only under an
    exclusive one. The kernel lets go of a dead borrower's lock, and the file leaves nothing behind.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def name(self) -> tuple[int, int]:
        """Arguments of `borrow`: process id and descriptor."""
        return os.getpid(), self._fd

    def lend(self) -> None:
        """Others may borrow."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def recall(self) -> bool:
        """Take the memory back if no process reads it: none can until the next `lend`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Nothing is lent any more; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Borrowed:
    """The borrower's side: the owner leaves the memory alone until `give_back`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def give_back(self) -> None:
        """This process reads it no more; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def borrow(pid: int, fd: int) -> Borrowed:
    """Open the GPU memory that another process lent as `Loan.name`, so that it stays valid.

    Raises:
        NotLent: it cannot be had; the text says why.
    """
    path = Path(f"/proc/{pid:d}/fd/{fd:d}")
    try:
        # Only the link is looked at first: opening somebody else's file could have effects.
        is_loan = str(path.readlink()) == _LINK
        own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_loan else -1
    except OSError as error:
        raise NotLent(f"process {pid} lends nothing to this one: {error.strerror}") from error
    if own_fd < 0:
        raise NotLent(f"descriptor {fd} of process {pid} is not a loan")
    try:
        fcntl.flock(own_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(own_fd)
        raise NotLent("its owner is writing for another version") from error
    return Borrowed(own_fd)


HANDLE_BYTES = 64
BLOCK_BYTES = 2 << 20
"""Allocations are multiples of this: a smaller one would share its block with its neighbours."""
_MAPS = Path("/proc/self/maps")
_MAPS_COLUMNS = 6
LibraryT = TypeVar("LibraryT", bound=ctypes.CDLL)
_PEER_ACCESS = 1
_FOR_ALL_GPUS = 1
_RELAXED = 2
_ATTRIBUTE_WORDS = 64
"""More than any version of cudaPointerAttributes has; its first one is the kind of memory."""
_OF_HOST = 1
_BY_ADDRESS = 4
"""The addresses tell which way a copy goes."""


class CudaError(Exception):
    """A call failed; the text says which and why."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes at an address of a device; `torch.as_tensor` makes a tensor of them, without a copy."""

    address: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """As numba, CuPy and PyTorch agree on it."""
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class CudaMemory:
    """Allocates, exports and opens; the CUDA runtime is the one that this process has loaded."""

    def __init__(self) -> None:
        """Raises CudaError where no CUDA runtime is loaded: import torch first."""
        self._runtime = _loaded("libcudart", ctypes.CDLL)
        self._driver = _loaded("libcuda", ctypes.CDLL)
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        pointer, result = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self._runtime.cudaMalloc.argtypes = (result, ctypes.c_size_t)
        self._runtime.cudaFree.argtypes = (pointer,)
        self._runtime.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
        self._runtime.cudaIpcOpenMemHandle.argtypes = (result, _Handle, ctypes.c_uint)
        self._runtime.cudaIpcCloseMemHandle.argtypes = (pointer,)
        self._runtime.cudaHostRegister.argtypes = (pointer, ctypes.c_size_t, ctypes.c_uint)
        self._runtime.cudaHostUnregister.argtypes = (pointer,)
        size, kind = ctypes.c_size_t, ctypes.c_int
        self._runtime.cudaMemcpyAsync.argtypes = (pointer, pointer, size, kind, pointer)

    def allocate(self, size_bytes: int) -> int:
        """Address of at least so many bytes, not initialised."""
        address = ctypes.c_void_p()
        rounded = -(-max(1, size_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        self._call("cudaMalloc", ctypes.byref(address), rounded)
        return address.value or 0

    def free(self, address: int) -> None:
        """Give an allocation back; waits until nothing uses it on this device."""
        self._call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """Handle of an allocation for other processes."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes, size_bytes: int) -> int:
        """Address in this process of what another one exported; to be closed.

        Raises:
            CudaError: it is not a handle of memory that can be had here, or of less than
                `size_bytes`.
        """
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, _PEER_ACCESS)
        found = address.value or 0
        room = self._size_of(found)
        if room < size_bytes:
            self.close(found)
            raise CudaError(f"the handle leads to {room} bytes, not to {size_bytes}")
        return found

    def close(self, address: int) -> None:
        """Undo `open`; nothing may use the memory any more."""
        self._call("cudaIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy between GPUs, on the stream of that handle.

        Engines of a GPU that do nothing but copy are used: kernels of others run on beside them.
        Unlike `LockedCopies` it lets go of the interpreter: the first copy may have to map memory.
        """
        self._call("cudaMemcpyAsync", target, source, size_bytes, _BY_ADDRESS, stream)

    def use(self, device: int) -> None:
        """Make it this thread's device, and leave graphs alone that other threads capture."""
        self._call("cudaSetDevice", device)
        mode = ctypes.c_int(_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """Keep host memory in its place, so that every GPU copies from and to it by itself.

        Raises:
            CudaError: it cannot be, for example because the system allows no more of it.
        """
        self._call("cudaHostRegister", address, size_bytes, _FOR_ALL_GPUS)

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`, before the memory is unmapped; no copy may be under way."""
        self._call("cudaHostUnregister", address)

    def _size_of(self, address: int) -> int:
        """Bytes from `address` to the end of its allocation; 0 if there is none."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status: int = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        return base.value + size.value - address if status == 0 else 0

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes converts them
        status: int = getattr(self._runtime, name)(*arguments)
        if status != 0:
            self._runtime.cudaGetLastError()  # forgotten, or torch would raise it later
            text: bytes = self._runtime.cudaGetErrorString(status)
            raise CudaError(f"{name}: {text.decode()} ({status})")


class LockedCopies:
    """Queues copies between a GPU and page-locked memory, and keeps the interpreter meanwhile.

    Whoever lets go of it for a call waits up to 5 ms to have it back, if another thread computes.
    That is more than a piece's copy takes, and torch lets go of it several times for each.
    """

    def __init__(self) -> None:
        """Raises CudaError where no CUDA runtime is loaded: import torch first."""
        self._runtime = _loaded("libcudart", ctypes.PyDLL)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._runtime.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
        self._runtime.cudaPointerGetAttributes.argtypes = (pointer, pointer)

    def is_locked(self, address: int) -> bool:
        """Whether the host's memory there is page-locked."""
        found = (ctypes.c_int * _ATTRIBUTE_WORDS)()
        status: int = self._runtime.cudaPointerGetAttributes(found, address)
        if status != 0:
            self._runtime.cudaGetLastError()  # forgotten, or torch would raise it later
        return status == 0 and found[0] == _OF_HOST

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy within one page-locked piece of memory; few hundreds may be under way.

        Args:
            target: an address of the host or of the GPU.
            source: likewise.
            size_bytes: of both.
            stream: handle of a stream of the thread's device.

        Raises:
            CudaError: nothing is copied, or an earlier call of this process has failed.
        """
        status: int = self._runtime.cudaMemcpyAsync(target, source, size_bytes, _BY_ADDRESS, stream)
        if status != 0:
            self._runtime.cudaGetLastError()
            raise CudaError(f"cudaMemcpyAsync failed ({status})")


@cache
def locked_copies() -> LockedCopies | None:
    """Those of this process, once it uses a GPU; None: its runtime is not CUDA's own."""
    try:
        return LockedCopies()
    except CudaError:
        return None


def loaded_path(name: str) -> str:
    """Path of a shared library that is part of this process already; it may hold spaces.

    Raises:
        CudaError: there is none of that name.
    """
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        *_, path = line.split(maxsplit=_MAPS_COLUMNS - 1)
        if Path(path).name.startswith(f"{name}.so"):
            return path
    raise CudaError(f"{name} is not loaded in this process")


def _loaded(name: str, load: Callable[[str], LibraryT]) -> LibraryT:
    path = loaded_path(name)
    try:
        return load(path)
    except OSError as error:
        # It was replaced while this process runs.
        raise CudaError(f"{path} cannot be loaded: {error}") from error


# Spec: docs/protocol.md, "Bucket".

_MAX_NUMBER = 2**31 - 1
_Number = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)]


class BadHandle(ValueError):
    """Not a handle of GPU memory."""


class CudaHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """GPU memory that another process of this host lends."""

    memory: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    """For `CudaMemory.open`."""
    pid: _Number
    """Of the owner; with `loan` the name of its `Loan`."""
    loan: _Number

    def pack(self) -> bytes:
        """Its bytes on the wire."""
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
