"""The machine, the installed packages, and what torch sees of GPUs."""

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
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
SMALL_SHARED_BYTES = 1 * GIB
"""A container of Docker has 64 MiB unless told otherwise."""
MANY_FILES = 4096
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
    yield _shared_memory()
    yield _open_files()


def _shared_memory() -> Finding:
    name = "shared memory"
    if not SHARED_MEMORY.is_dir():
        says = f"there is no {SHARED_MEMORY}: weights cannot be published from here; mount a tmpfs"
        return Finding("machine", name, "missing", says)
    usage = shutil.disk_usage(SHARED_MEMORY)
    says = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.total < SMALL_SHARED_BYTES:
        says += ": too little for weights; give a container --shm-size (Docker), or mount a memory "
        return Finding("machine", name, "note", f"{says}volume at {SHARED_MEMORY} (Kubernetes)")
    return Finding("machine", name, "ok", f"{says}; a weight version needs its size of it here")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft} open files now, {hard} at most"
    if hard == resource.RLIM_INFINITY or hard >= MANY_FILES:
        return Finding("machine", "descriptors", "ok", f"{says}; actors take what they need")
    says += f": a router of a large fleet needs {MANY_FILES}; raise the hard limit (`ulimit -Hn`, "
    return Finding("machine", "descriptors", "note", f"{says}LimitNOFILE= of a systemd unit)")


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
    yield from _gpu_peers(torch.cuda.device_count(), torch.cuda.can_device_access_peer)


def _gpu_peers(n_gpus: int, can_access: Callable[[int, int], bool]) -> Iterator[Finding]:
    """Whether GPUs of this machine reach each other's memory; nothing where there is one."""
    pairs = [(a, b) for a in range(n_gpus) for b in range(n_gpus) if a != b]
    apart = [f"{a} to {b}" for a, b in pairs if not can_access(a, b)]
    if apart:
        says = f"no direct access from {', '.join(apart)}: weights go through the host's memory"
        advice = "see `nvidia-smi topo -m`, and switch ACS off where it is on"
        yield Finding("devices", "GPU peers", "note", f"{says}; {advice}")
    elif pairs:
        says = f"all {n_gpus} GPUs reach each other's memory"
        yield Finding("devices", "GPU peers", "ok", says)


def _why_no_gpu(cuda: str | None) -> str:
    driver = DRIVER.exists()
    if driver and not cuda:
        return "there is a driver, but this torch is built for CPUs only"
    if cuda and not driver:
        return "no driver of NVIDIA is loaded"
    if driver:
        return "there is a driver, but torch can use no device: see nvidia-smi"
    return "no driver of NVIDIA is loaded, and this torch is built for CPUs only"
