"""Everything that the bus raises on purpose; `BusError` is the root. See `bus.errors`."""

from bus.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    DeliveryError,
    EngineFailed,
    LocalProtocolError,
    MailboxFull,
    PeerLost,
    ProcessFailed,
    ProtocolError,
    Refused,
    RemoteProtocolError,
    RequestCancelled,
    RequestError,
    RequestExpired,
    SettingsError,
    StaleVersion,
)
from trainer_adapter.rollout import RolloutCancelled

__all__ = [
    "ActorStopped",
    "BusError",
    "DeadlineExceeded",
    "DeliveryError",
    "EngineFailed",
    "LocalProtocolError",
    "MailboxFull",
    "PeerLost",
    "ProcessFailed",
    "ProtocolError",
    "Refused",
    "RemoteProtocolError",
    "RequestCancelled",
    "RequestError",
    "RequestExpired",
    "RolloutCancelled",
    "SettingsError",
    "StaleVersion",
]
