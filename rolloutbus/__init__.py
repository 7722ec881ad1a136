"""The public face: a client, a weight publisher, local fleets, and what they speak of.

A name is imported when it is asked for: a router or an engine host needs none of the client, and
the publishers need torch, which is an optional dependency.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolloutbus import errors, events

    __version__: str
    from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
    from rolloutbus.bus.wire.messages.generation import (
        DetachedRequest,
        Grammar,
        Media,
        Processor,
        SamplingParams,
        Want,
    )
    from rolloutbus.launcher.fleet import Fleet, up
    from rolloutbus.replay.offline import OfflineRollout, OfflineRollouts
    from rolloutbus.replay.recorder import Recorder, record
    from rolloutbus.replay.subscriber import Subscriber, subscribe
    from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
    from rolloutbus.trainer_adapter.client.memory_tags import MemoryTag
    from rolloutbus.trainer_adapter.client.rollout import Delta, FleetResult, Rollout
    from rolloutbus.trainer_adapter.client.session import Session
    from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient, connect_sync
    from rolloutbus.trainer_adapter.client.text import TextClient
    from rolloutbus.trainer_adapter.openai.client import OpenAIClient
    from rolloutbus.trainer_adapter.openai.sync_client import SyncOpenAIClient
    from rolloutbus.trainer_adapter.publisher.lora import PublishedLora
    from rolloutbus.trainer_adapter.publisher.published import Published
    from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
    from rolloutbus.trainer_adapter.publisher.sharded import ShardedSource
    from rolloutbus.trainer_adapter.publisher.sync_publisher import SyncWeightPublisher
    from rolloutbus.trainer_adapter.publisher.transfer import WeightTransferHandle

_HOMES = {
    "rolloutbus.bus.wire.messages.control": (
        "FleetStatus",
        "WorkerStatus",
    ),
    "rolloutbus.bus.wire.messages.generation": (
        "DetachedRequest",
        "Grammar",
        "Media",
        "Processor",
        "SamplingParams",
        "Want",
    ),
    "rolloutbus.launcher.fleet": (
        "Fleet",
        "up",
    ),
    "rolloutbus.replay.offline": (
        "OfflineRollout",
        "OfflineRollouts",
    ),
    "rolloutbus.replay.recorder": (
        "Recorder",
        "record",
    ),
    "rolloutbus.replay.subscriber": (
        "Subscriber",
        "subscribe",
    ),
    "rolloutbus.trainer_adapter.client.client": (
        "RolloutClient",
        "connect",
    ),
    "rolloutbus.trainer_adapter.publisher.lora": ("PublishedLora",),
    "rolloutbus.trainer_adapter.client.memory_tags": ("MemoryTag",),
    "rolloutbus.trainer_adapter.openai.client": ("OpenAIClient",),
    "rolloutbus.trainer_adapter.openai.sync_client": ("SyncOpenAIClient",),
    "rolloutbus.trainer_adapter.publisher.published": ("Published",),
    "rolloutbus.trainer_adapter.publisher.publisher": ("WeightPublisher",),
    "rolloutbus.trainer_adapter.client.rollout": (
        "Delta",
        "FleetResult",
        "Rollout",
    ),
    "rolloutbus.trainer_adapter.client.session": ("Session",),
    "rolloutbus.trainer_adapter.publisher.sharded": ("ShardedSource",),
    "rolloutbus.trainer_adapter.client.sync_client": (
        "SyncRolloutClient",
        "connect_sync",
    ),
    "rolloutbus.trainer_adapter.publisher.sync_publisher": ("SyncWeightPublisher",),
    "rolloutbus.trainer_adapter.client.text": ("TextClient",),
    "rolloutbus.trainer_adapter.publisher.transfer": ("WeightTransferHandle",),
}
"""Module -> the names of it that are public."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

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
    "SamplingParams",
    "Session",
    "ShardedSource",
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
    if name in ("errors", "events"):
        return importlib.import_module(f"rolloutbus.{name}")
    if name == "__version__":
        value: Any = importlib.import_module("rolloutbus.launcher.version").installed_version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
