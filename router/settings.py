"""What an operator may set on a router."""

import msgspec

from bus.endpoints import require_local
from bus.errors import SettingsError
from bus.settings import LeaseSettings


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses and bounds; built once, in `__main__`."""

    frontend: str
    """Endpoint for clients."""
    backend: str
    """Endpoint for workers and the weight store."""
    leases: LeaseSettings = LeaseSettings()
    queue_limit: int = 10_000
    """Requests that may wait here; more are refused with `busy`."""
    client_grace_s: float = 30.0
    """Work of a client that went silent is aborted after this."""
    seed: int | None = None
    """Seed of the placement's random choices; None: from the system."""
    exit_with_parent: bool = False
    """Leave when the process that started this one dies."""

    def __post_init__(self) -> None:
        require_local(self.frontend)
        require_local(self.backend)
        if self.queue_limit < 1:
            raise SettingsError("queue_limit must be at least 1")
