"""The public face: a client, a weight publisher, local fleets, and what they speak of.

The publishers need torch, which is an optional dependency; they are imported when asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bus.messages.control import FleetStatus, WorkerStatus
from bus.messages.generation import (
    DetachedRequest,
    Grammar,
    Media,
    Processor,
    Sampling,
    Want,
)
from launcher.fleet import Fleet, up
from launcher.version import installed_version
from replay.offline import OfflineRollout, OfflineRollouts
from replay.recorder import Recorder, record
from replay.subscriber import Subscriber, subscribe
from rolloutbus import errors, events
from trainer_adapter.client import RolloutClient, connect
from trainer_adapter.memory_tags import MemoryTag
from trainer_adapter.openai.client import OpenAIClient
from trainer_adapter.openai.sync_client import SyncOpenAIClient
from trainer_adapter.published import Published
from trainer_adapter.rollout import Delta, FleetResult, Rollout
from trainer_adapter.session import Session
from trainer_adapter.subscriber import StreamSubscriber
from trainer_adapter.sync_client import SyncRolloutClient, connect_sync
from trainer_adapter.text import TextClient
from trainer_adapter.transfer import WeightTransferHandle

if TYPE_CHECKING:
    from trainer_adapter.lora import PublishedLora
    from trainer_adapter.publisher import WeightPublisher
    from trainer_adapter.sharded import ShardedSource
    from trainer_adapter.sync_publisher import SyncWeightPublisher

_NEED_TORCH = {
    "PublishedLora": "trainer_adapter.lora",
    "ShardedSource": "trainer_adapter.sharded",
    "SyncWeightPublisher": "trainer_adapter.sync_publisher",
    "WeightPublisher": "trainer_adapter.publisher",
}

__version__ = installed_version()

__all__ = [
    "Delta",
    "DetachedRequest",
    "Fleet",
    "FleetResult",
    "FleetStatus",
    "Grammar",
    "Media",
    "MemoryTag",
    "OfflineRollout",
    "OfflineRollouts",
    "OpenAIClient",
    "Processor",
    "Published",
    "PublishedLora",
    "Recorder",
    "Rollout",
    "RolloutClient",
    "Sampling",
    "Session",
    "ShardedSource",
    "StreamSubscriber",
    "Subscriber",
    "SyncOpenAIClient",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "TextClient",
    "Want",
    "WeightPublisher",
    "WeightTransferHandle",
    "WorkerStatus",
    "__version__",
    "connect",
    "connect_sync",
    "errors",
    "events",
    "record",
    "subscribe",
    "up",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module's name stands for
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
