"""Which GPU tensors are on, and waiting for what their owner has queued there."""

from collections.abc import Sequence
from typing import Any, cast

import torch


def only_gpu(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The GPU that holds all of them; None if there is no such one."""
    devices = {each.device for each in tensors}
    device = next(iter(devices)) if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str:
    """Its name in every process, as nvidia-smi shows it."""
    cuda = cast("Any", torch.cuda)  # untyped
    return f"GPU-{cuda.get_device_properties(device).uuid}"


class QueuedWork:
    """What the calling thread has asked of its current streams so far."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        gpus = {each.device for each in tensors if each.device.type == "cuda"}
        self._events = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def wait(self) -> None:
        """Until it is done; for another thread, whose streams are others."""
        for event in self._events:
            event.synchronize()
