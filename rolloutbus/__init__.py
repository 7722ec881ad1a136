"""The public face: a client, a weight publisher, local fleets, and what they take.

What they return is in `rolloutbus.types`, what they raise in `rolloutbus.errors`, and what a
subscriber yields in `rolloutbus.events`.

A name is imported when it is asked for: a router or an engine host needs none of the client, and
the publishers need torch, which is an optional dependency.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolloutbus import errors, events, types

    __version__: str
    from rolloutbus.bus.wire.messages.generation import (
        Grammar,
        Media,
        Processor,
        SamplingParams,
        Want,
    )
    from rolloutbus.launcher.fleet import Fleet, up
    from rolloutbus.launcher.on_ray.launcher import RayLauncher
    from rolloutbus.replay.offline import OfflineRollouts
    from rolloutbus.replay.recorder import record
    from rolloutbus.replay.subscriber import subscribe
    from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
    from rolloutbus.trainer_adapter.client.core.results import Rollout
    from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient, connect_sync
    from rolloutbus.trainer_adapter.client.text import TextClient
    from rolloutbus.trainer_adapter.openai.client import OpenAIClient, SyncOpenAIClient
    from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
    from rolloutbus.trainer_adapter.publisher.sharded import ShardedSource
    from rolloutbus.trainer_adapter.publisher.sync_publisher import SyncWeightPublisher

_MESSAGES = "rolloutbus.bus.wire.messages.generation"
_HOMES = {
    "Fleet": "rolloutbus.launcher.fleet",
    "Grammar": _MESSAGES,
    "Media": _MESSAGES,
    "OfflineRollouts": "rolloutbus.replay.offline",
    "OpenAIClient": "rolloutbus.trainer_adapter.openai.client",
    "Processor": _MESSAGES,
    "RayLauncher": "rolloutbus.launcher.on_ray.launcher",
    "Rollout": "rolloutbus.trainer_adapter.client.core.results",
    "RolloutClient": "rolloutbus.trainer_adapter.client.client",
    "SamplingParams": _MESSAGES,
    "ShardedSource": "rolloutbus.trainer_adapter.publisher.sharded",
    "SyncOpenAIClient": "rolloutbus.trainer_adapter.openai.client",
    "SyncRolloutClient": "rolloutbus.trainer_adapter.client.sync_client",
    "SyncWeightPublisher": "rolloutbus.trainer_adapter.publisher.sync_publisher",
    "TextClient": "rolloutbus.trainer_adapter.client.text",
    "Want": _MESSAGES,
    "WeightPublisher": "rolloutbus.trainer_adapter.publisher.publisher",
    "connect": "rolloutbus.trainer_adapter.client.client",
    "connect_sync": "rolloutbus.trainer_adapter.client.sync_client",
    "record": "rolloutbus.replay.recorder",
    "subscribe": "rolloutbus.replay.subscriber",
    "up": "rolloutbus.launcher.fleet",
}
"""Name -> the module that it comes from."""
_RENAMED = {"Sampling": "SamplingParams", "StreamSubscriber": "subscribe"}
"""Name of a former version -> what to use now."""

__all__ = [
    "Fleet",
    "Grammar",
    "Media",
    "OfflineRollouts",
    "OpenAIClient",
    "Processor",
    "RayLauncher",
    "Rollout",
    "RolloutClient",
    "SamplingParams",
    "ShardedSource",
    "SyncOpenAIClient",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "TextClient",
    "Want",
    "WeightPublisher",
    "__version__",
    "connect",
    "connect_sync",
    "errors",
    "events",
    "record",
    "subscribe",
    "types",
    "up",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module's name stands for
    if name in ("errors", "events", "types"):
        return importlib.import_module(f"rolloutbus.{name}")
    if name == "__version__":
        value: Any = importlib.import_module("rolloutbus.launcher.version").installed_version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise _missing(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _missing(name: str) -> Exception:
    # An ImportError where there is something to say: `from rolloutbus import NAME` would replace
    # the text of an AttributeError.
    if name in _RENAMED:
        return ImportError(f"rolloutbus has no {name!r}: use {_RENAMED[name]}", name=name)
    if name[:1].isupper() and name in importlib.import_module("rolloutbus.types").__all__:
        return ImportError(f"{name!r} is in rolloutbus.types", name=name)
    return AttributeError(f"module {__name__!r} has no attribute {name!r}")
