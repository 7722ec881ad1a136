"""What a client must know before it starts: its name, its router, its limits."""

import msgspec

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.endpoints import require_routers
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import check_name

TICK_S = 0.05
"""Between two ticks of a client's core."""


class ClientSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times in seconds."""

    name: str
    """Unique among live clients: a newer client of the same name replaces this one."""
    router: str
    """Endpoint of the router's frontend; of several routers, separated by commas, in the order in
    which they are tried."""
    fleet: str = ""
    """Identity of the fleet that is expected there, as `client.fleet` told; empty: any. Another one
    ends the client."""
    lease: LeaseSettings = msgspec.field(default_factory=LeaseSettings)
    connect_timeout_s: float = 10.0
    """Until the first welcome; afterwards a lost router is waited for."""
    control_deadline_s: float = 30.0
    """Deadline of control commands that name none."""
    max_open: int = 100_000
    """Requests that may be open at once; more raise MailboxFull."""
    overtime_s: float = 1.0
    """How long past its deadline a request waits for its ending before the client gives up."""
    defer_first_s: float = 0.05
    defer_max_s: float = 1.0
    """Bounds of the wait before a request that no worker was ready for is sent again."""
    abort_patience_s: float = 10.0
    """An aborted request that nobody knows any more ends by itself after this long."""
    max_crashes: int = 5
    """Engine crashes while it ran after which a request is given up. A backstop: the router finds
    poison at the third, unless it was restarted in between."""
    repair_tries: int = 3
    """Repairs in a row that bring nothing; afterwards the result fills the gap."""
    security: SecuritySettings | None = None
    """Keys; None: a router on this machine that asks for none."""

    def __post_init__(self) -> None:
        problem = check_name(self.name)
        if isinstance(problem, Problem):
            raise SettingsError(f"client name: {problem.message}")
        require_routers(self.router, self.security)
