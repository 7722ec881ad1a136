"""The machine, the installed packages, and what torch sees of GPUs."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["ok", "note", "missing", "failed"]


class Finding(msgspec.Struct, frozen=True):
    """What was found; one line for people."""

    section: str
    name: str
    state: State
    """`note`: works, with something to know; `missing`: is not there, which may be as intended;
    `failed`: is there and does not work."""
    says: str


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is only measured
GIB = 1 << 30
DRIVER = Path("/proc/driver/nvidia/version")
REQUIRED = ("msgspec", "numpy", "pyzmq", "uvloop", "xxhash", "zstandard")
OPTIONAL = {
    "torch": "every engine that runs a model",
    "transformers": "the transformers engine, and SGLang",
    "safetensors": "weights from files",
    "tokenizers": "text in and out",
    "sglang": "the sglang engine",
    "sglang-kernel": "SGLang's kernels on a GPU",
    "flashinfer-python": "SGLang's attention on a GPU",
    "xgrammar": "grammars, JSON schemas and forced tool calls",
    "torch-memory-saver": "SGLang gives memory back to a trainer: sleep and wake",
}


def machine() -> Iterator[Finding]:
    """Python, cores and memory."""
    yield Finding("machine", "python", "ok", f"{platform.python_version()}, {platform.platform()}")
    n_cores = len(os.sched_getaffinity(0))
    few = "note" if n_cores < 4 else "ok"  # noqa: PLR2004 - actor, host, scheduler, detokenizer
    yield Finding("machine", "cores", few, f"{n_cores} that this process may use")
    memory = _memory_bytes()
    available, total = memory["MemAvailable"], memory["MemTotal"]
    says = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    yield Finding("machine", "memory", "ok", says)
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    yield Finding(
        "machine",
        "shared memory",
        "ok" if shared else "missing",
        f"{shared / GIB:.1f} GiB free; a weight version that this machine takes needs its size",
    )


def packages() -> Iterator[Finding]:
    """Versions of what is installed."""
    for name in REQUIRED:
        version = version_of(name)
        state = "ok" if version else "failed"
        yield Finding("packages", name, state, version or "needed by every actor")
    for name, use in OPTIONAL.items():
        version = version_of(name)
        state = "ok" if version else "missing"
        yield Finding("packages", name, state, version or f"for {use}")


def version_of(name: str) -> str:
    """Of an installed distribution; empty if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _memory_bytes() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def devices() -> Iterator[Finding]:
    """Torch, and each GPU with its memory; why there is none."""
    try:
        import torch  # noqa: PLC0415 - seconds, and optional
    except ImportError as error:
        yield Finding("devices", "torch", "missing", str(error))
        return
    built_for = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    yield Finding("devices", "torch", "ok", f"{torch.__version__}, {built_for}")
    if not torch.cuda.is_available():
        yield Finding("devices", "GPU", "missing", _why_no_gpu(torch.version.cuda))
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(
            "devices",
            f"GPU {index}",
            "ok",
            f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, "
            f"compute capability {major}.{minor}",
        )


def _why_no_gpu(cuda: str | None) -> str:
    driver = DRIVER.exists()
    if driver and not cuda:
        return "there is a driver, but this torch is built for CPUs only"
    if cuda and not driver:
        return "no driver of NVIDIA is loaded"
    if driver:
        return "there is a driver, but torch can use no device: see nvidia-smi"
    return "no driver of NVIDIA is loaded, and this torch is built for CPUs only"
