"""Types of results and arguments besides the names of `rolloutbus` itself: for annotations."""

from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.bus.wire.messages.generation import DetachedRequest
from rolloutbus.launcher.ticket import Ticket
from rolloutbus.replay.offline import OfflineRollout
from rolloutbus.replay.recorder import Recorder
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.commands import MemoryTag
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult
from rolloutbus.trainer_adapter.client.fixed_facts import FixedFacts
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.sync_client import SyncSession
from rolloutbus.trainer_adapter.client.transcript import Transcript
from rolloutbus.trainer_adapter.publisher.transfer import (
    Published,
    PublishedLora,
    TransferProgress,
    WeightTransferHandle,
)

__all__ = [
    "Delta",
    "DetachedRequest",
    "FixedFacts",
    "FleetResult",
    "FleetStatus",
    "MemoryTag",
    "OfflineRollout",
    "Published",
    "PublishedLora",
    "Recorder",
    "Session",
    "Subscriber",
    "SyncSession",
    "Ticket",
    "Transcript",
    "TransferProgress",
    "WeightTransferHandle",
    "WorkerStatus",
]
