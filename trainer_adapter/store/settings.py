"""The settings of a weight store."""

import msgspec

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.endpoints import (
    check_advertised,
    require_bindable,
    require_routers,
)
from rolloutbus.bus.wire.errors import SettingsError

KEEP_COMMITTED = 3
"""Unless it is told otherwise."""


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Built once, in `__main__`."""

    router: str
    """Endpoint of the router's backend; of several routers, separated by commas, in the order in
    which they are tried."""
    directory: str
    """Holds the durable record; one store at a time."""
    bulk: str = ""
    """Where manifests and chunks are served; port 0 picks a free one. Empty: a free port of the
    interface that faces the router, which is the loopback if the router's address is."""
    advertise: str = ""
    """Host that peers are told instead of that of `bulk`, with the same port: for networks that
    translate addresses. Empty: the one that is listened on."""
    name: str = "store"
    lease: LeaseSettings = LeaseSettings()
    keep_committed: int = KEEP_COMMITTED
    """Committed versions of each policy whose bytes are kept."""
    keep_sealed: int = 2
    """Versions sealed but not (yet) committed that are kept, of each policy."""
    reservation_s: float = 300.0
    """A reserved version that is not written or sealed for so long is given up."""
    pull_grace_s: float = 6.0
    """A version is kept for so long after its last chunk was asked for; a puller that got no
    answer asks again after 5 s. Readers of a mapped segment hold it by themselves."""
    disk: str = ""
    """Directory below which every sealed version is also written as files, made if missing; a
    store that finds its shared memory empty reads the last committed one back. Empty: none."""
    security: SecuritySettings | None = None
    """Keys; without an allow-list of its own the router hands one over. None: this machine only,
    without keys."""
    exit_with_parent: bool = False
    """Leave when the process that started this one dies."""

    def __post_init__(self) -> None:
        require_routers(self.router, self.security)
        if self.advertise:
            check_advertised(self.advertise)
        if self.bulk:
            require_bindable(
                self.bulk,
                self.security,
                is_router=True,
                is_announced=not self.advertise,
                is_member=True,
            )
        if self.keep_committed < 1 or self.keep_sealed < 1:
            raise SettingsError("keep_committed and keep_sealed must be at least 1")
        if not (self.reservation_s > 0 and self.pull_grace_s > 0):  # NaN is not, either
            raise SettingsError("reservation_s and pull_grace_s must be more than 0 seconds")
