"""A platform plugin of verl's for machines without a GPU: `VERL_USE_EXTERNAL_MODULES` names it.

With it and `VERL_ENGINE_DEVICE=cuda` verl's own FSDP2 workers train on the CPU.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import distributed

NO_MEMORY = ("memory_", "max_memory_", "reset_peak_memory_", "empty_cache")


class Cpu:
    """`torch.cpu`, and of `torch.cuda` what verl asks about memory: there is none."""

    mem_get_info = staticmethod(lambda *_: (0, 0))
    get_device_name = staticmethod(lambda *_: "CPU")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a module's
        return (lambda *_: 0) if name.startswith(NO_MEMORY) else getattr(torch.cpu, name)


@PlatformRegistry.register("nvidia")  # what verl falls back to
class PlatformCPU(PlatformCUDA):
    """The platform: one device, the CPU."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = Cpu()
    communication_backend_name = staticmethod(lambda: "gloo")
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    is_available = is_platform_available = staticmethod(lambda **_: True)
    set_device = synchronize = set_allocator_settings = staticmethod(lambda *_: None)
    empty_cache = profiler_start = profiler_stop = cudart = staticmethod(lambda: None)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_device_capability = staticmethod(lambda *_: (None, None))
    is_ipc_supported = staticmethod(lambda: False)

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Nothing is told of it."""
        del msg
        yield


def over_gloo(
    timeout_second: float | None = None,
    backend: str = "cpu:gloo",
    *,
    init: Callable[..., None] = distributed.initialize_global_process_group_ray,
) -> None:
    """verl would name the CPU twice, which PyTorch does not take."""
    init(timeout_second, backend)


distributed.initialize_global_process_group_ray = over_gloo
