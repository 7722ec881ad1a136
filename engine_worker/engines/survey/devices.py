"""What torch sees: itself and its GPUs."""

from collections.abc import Iterator
from pathlib import Path

from rolloutbus.engine_worker.engines.survey.machine import Finding

GIB = 1 << 30
DRIVER = Path("/proc/driver/nvidia/version")


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
