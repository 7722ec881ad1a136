"""Settings of one worker: read once, checked on construction."""

import math
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.endpoints import (
    check_advertised,
    is_local,
    require_bindable,
    require_routers,
)
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.validation import check_name

START_TIMEOUT_S = 600.0
"""For an engine: a large model takes minutes to be read."""


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often tokens are published."""

    coarse_tokens: int = 32
    """A request that no client streams is published every so many tokens ..."""
    coarse_s: float = 1.0
    """... or seconds, so that it can resume elsewhere."""
    idle_s: float = 0.2
    """Between two idle heartbeats of a topic."""


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the engine host counts as dead."""

    silent_s: float = 1.5
    """The host has sent nothing: the worker takes no new requests until it does."""
    give_up_s: float = 5.0
    """The host has sent nothing for so long, and is stopped: its requests go on elsewhere."""
    wedged_s: float = 30.0
    """Work runs, but the step counter stands still; or the host sends nothing at all."""
    phase_s: float = 300.0
    """The same while weights or memory are moved, which may take long and stop the steps."""
    start_timeout_s: float = START_TIMEOUT_S
    """From the start of the process until the engine is ready."""
    max_crashes: int = 5
    """More within `crash_window_s`, or more starts in a row that fail, and the worker gives up."""
    crash_window_s: float = 60.0
    pull_timeout_s: float = 300.0
    """For the transfer of one weight version."""


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker: its name, where its router is, which engine it runs."""

    name: str
    """Unique in the fleet; kept over restarts."""
    router: str
    """Endpoint of the router's backend; of several routers, separated by commas, in the order in
    which they are tried."""
    policy: str = "default"
    stream: str = ""
    """Where tokens are published; port 0 takes a free one. Empty: a free port of the interface that
    faces the router, which is the loopback if the router's address is."""
    relay: str = ""
    """Where other workers may pull weights that this one holds; not those that it maps or has on a
    GPU. Empty: with keys, and `stream` beyond this machine, on that same address; else nowhere."""
    advertise: str = ""
    """Host that peers are told instead of that of `stream` and `relay`, with the same ports: for
    networks that translate addresses. Empty: the one that is listened on."""
    weights_root: str = ""
    """Directory in which a store's versions and adapters may be read from files; empty: none."""
    save_targets: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Where `save_weights` may write: name -> directory, or an address that the engine knows."""
    profile_dir: str = ""
    """Directory that profiles are written into; empty: none are."""
    engine: str = "transformers"
    engine_options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Settings of that engine; see `engine_worker.engines`."""
    lease: LeaseSettings = LeaseSettings()
    streams: StreamSettings = StreamSettings()
    host: HostSettings = HostSettings()
    outbox_limit_bytes: int = 1 << 30
    drain_s: float = 0.0
    """After SIGTERM the worker takes no more, and what runs may take so long to end; 0: it leaves
    at once. Either way clients go on elsewhere with what has not ended."""
    security: SecuritySettings | None = None
    """Keys; without an allow-list of its own the router hands one over. None: this machine only,
    without keys."""
    key_patience_s: float = START_TIMEOUT_S
    """A worker that has never joined ends when routers have refused its key for so long."""
    exit_with_parent: bool = False
    """Die with the process that started this one."""

    def __post_init__(self) -> None:
        problem = check_name(self.name, field="name") or check_name(self.policy, field="policy")
        if problem is not None:
            raise SettingsError(f"{problem.field}: {problem.message}")
        for field, path in (("profile_dir", self.profile_dir), *self.save_targets.items()):
            if path and "://" not in path and not path.startswith("/"):
                raise SettingsError(f"{field}: {path!r} is no absolute path")
        if not 0 <= self.drain_s < math.inf:
            raise SettingsError(f"drain_s: {self.drain_s} is no number of seconds from 0 on")
        require_routers(self.router, self.security)
        if self.advertise:
            check_advertised(self.advertise)
        for endpoint, is_router in ((self.stream, False), (self.relay, True)):
            if endpoint:
                require_bindable(
                    endpoint,
                    self.security,
                    is_router=is_router,
                    is_announced=not self.advertise,
                    is_member=True,
                )

    @property
    def relay_endpoint(self) -> str:
        """Where to serve weights, a free port of the right address; empty: nowhere.

        Of a worker that has begun: its `stream` is known by then.
        """
        has_keys = self.security is not None and bool(self.security.key_file)
        if self.relay or not has_keys or not self.stream or is_local(self.stream):
            return self.relay
        host = urlsplit(self.stream).netloc.rpartition(":")[0]
        return f"tcp://{host}:0"
