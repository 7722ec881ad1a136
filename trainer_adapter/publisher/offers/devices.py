"""Which GPU tensors are on, and waiting for what their owner has queued there."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch

from rolloutbus.bus.wire.messages.membership import Member


def only_gpu(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The GPU that holds all of them; None if there is no such one."""
    devices = {each.device for each in tensors}
    device = next(iter(devices)) if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str:
    """Its name in every process, as nvidia-smi shows it."""
    cuda = cast("Any", torch.cuda)  # untyped
    return f"GPU-{cuda.get_device_properties(device).uuid}"


def gpus_of(tensors: Sequence[torch.Tensor]) -> set[str]:
    """UUIDs of the GPUs that they are on."""
    return {gpu_uuid(device) for device in {each.device for each in tensors if each.is_cuda}}


def is_shared(gpus: Collection[str], members: Iterable[Member], policy: str) -> bool:
    """Whether a worker of the policy attests that its weights are on one of these GPUs."""
    return any(each.policy == policy and not set(gpus).isdisjoint(each.gpus) for each in members)


class QueuedWork:
    """What the calling thread has asked of its current streams so far."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        gpus = {each.device for each in tensors if each.device.type == "cuda"}
        self._events = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def wait(self) -> None:
        """Until it is done; for another thread, whose streams are others."""
        for event in self._events:
            event.synchronize()
