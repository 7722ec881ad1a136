"""The GPUs of one engine, as the driver sees them."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from rolloutbus.engine_worker.weights.gpu import gpus_of


class Devices:
    """Those that SGLang computes on; none with a CPU."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments`: SGLang's own, as they came out in the end."""
        self._devices: list[torch.device] = []
        if str(arguments.get("device", "")).startswith("cuda"):
            n_ranks = int(arguments["tp_size"]) * int(arguments["pp_size"])
            first, step = int(arguments["base_gpu_id"]), int(arguments["gpu_id_step"])
            self._devices = [torch.device("cuda", first + i * step) for i in range(n_ranks)]

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self._devices)

    @property
    def uuids(self) -> tuple[str, ...]:
        """As nvidia-smi shows them."""
        return gpus_of(self._devices)

    def used_bytes(self) -> int:
        """Memory in use on all of them, by anybody; 0 with a CPU."""
        cuda = cast("Any", torch.cuda)  # untyped
        return sum(int(cuda.device_memory_used(device)) for device in self._devices)
