"""What an operator may set on a router."""

import math

import msgspec

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.endpoints import require_bindable, require_reachable
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.router.health.breaker import BreakerSettings

MIN_TAKEOVER_S = 2.0
TAKEOVER_S = 3.0


class PairSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a router that has a standby, or is one. Both must have the same `takeover_s`."""

    other: str
    """The other router's endpoint for clients."""
    is_first: bool
    """Of the two, the one that is active if both can be."""
    takeover_s: float = TAKEOVER_S
    """Silence of the active router after which the other one takes over."""
    other_backend: str = ""
    """The other router's endpoint for workers and the store; empty: not known here. It is only told
    to those that are invited."""

    def __post_init__(self) -> None:
        if "," in self.other:
            raise SettingsError(f"standby: {self.other[:200]!r}: a router has one other router")
        if not MIN_TAKEOVER_S <= self.takeover_s < math.inf:
            raise SettingsError(
                f"takeover_s must be at least {MIN_TAKEOVER_S:g} s: a busy router may be silent "
                "for a while"
            )


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses and bounds; built once, in `__main__`."""

    frontend: str
    """Endpoint for clients."""
    backend: str
    """Endpoint for workers and the weight store."""
    leases: LeaseSettings = LeaseSettings()
    queue_limit: int = 10_000
    """Requests that may wait here; more are refused with `busy`."""
    queue_bytes: int = 1 << 30
    client_weights: dict[str, float] = {}
    """Shares of named clients of the queue and of the workers, when more than one waits; a
    client that is not named has 1.0."""
    sessions_per_slot: float = 2.0
    """Sessions that may be open at a worker for each of its slots; more are refused with `busy`.
    Two keep the slots in use when a conversation samples about half of the time."""
    expected_workers: dict[str, str] = {}
    """Workers that are launched with the router -> their policy: `require="all"` counts them also
    before they have joined, until they leave in good order."""
    fleet: str = ""
    """Identity of the fleet, the same for each of its routers; a store's record counts more. Empty:
    nobody knows it yet."""
    breaker: BreakerSettings = BreakerSettings()
    dead_letters: str = ""
    """File that keeps requests which killed engines, appended to; empty: they are not kept."""
    tap: str = ""
    """Endpoint where everything that is routed is published, for recorders; empty: nowhere."""
    pair: PairSettings | None = None
    """The other router of the fleet, one of which stands by; None: there is none."""
    epoch: int = 1
    """Router epoch to begin with: above that of the router it follows."""
    client_grace_s: float = 30.0
    """Work of a client that went silent is aborted after this."""
    seed: int | None = None
    """Seed of the placement's random choices; None: from the system."""
    security: SecuritySettings | None = None
    """Keys and allow-list; None: this machine only, without keys."""
    exit_with_parent: bool = False
    """Leave when the process that started this one dies."""

    def __post_init__(self) -> None:
        for endpoint in (self.frontend, self.backend, *filter(None, [self.tap])):
            require_bindable(endpoint, self.security, is_router=True)
        if self.pair is not None:
            require_reachable(self.pair.other, self.security)
            if self.pair.other in (self.frontend, self.backend):
                raise SettingsError(f"standby: {self.pair.other} is this router's own address")
        if min(self.queue_limit, self.queue_bytes) < 1:
            raise SettingsError("queue_limit and queue_bytes must be at least 1")
        if not 0 < self.sessions_per_slot < math.inf:
            raise SettingsError("sessions_per_slot must be above 0")
        if any(not 0 < weight < math.inf for weight in self.client_weights.values()):
            raise SettingsError("client_weights must be above 0")
