"""The public face: a client, a weight publisher, local fleets, and what they speak of.

The publishers need torch, which is an optional dependency; they are imported when asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bus.messages.control import FleetStatus, WorkerStatus
from bus.messages.generation import Sampling
from launcher.fleet import Fleet, up
from launcher.version import installed_version
from rolloutbus import errors
from trainer_adapter.client import RolloutClient, connect
from trainer_adapter.rollout import Delta, FleetResult, Rollout
from trainer_adapter.subscriber import StreamSubscriber
from trainer_adapter.sync_client import SyncRolloutClient, connect_sync
from trainer_adapter.text import TextClient

if TYPE_CHECKING:
    from trainer_adapter.publisher import WeightPublisher
    from trainer_adapter.sync_publisher import SyncWeightPublisher

_NEED_TORCH = {
    "SyncWeightPublisher": "trainer_adapter.sync_publisher",
    "WeightPublisher": "trainer_adapter.publisher",
}

__version__ = installed_version()

__all__ = [
    "Delta",
    "Fleet",
    "FleetResult",
    "FleetStatus",
    "Rollout",
    "RolloutClient",
    "Sampling",
    "StreamSubscriber",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "TextClient",
    "WeightPublisher",
    "WorkerStatus",
    "__version__",
    "connect",
    "connect_sync",
    "errors",
    "up",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module's name stands for
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
