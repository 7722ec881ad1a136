"""The connection of SkyRL's objects to a fleet: usable from any event loop, made anew elsewhere.

SkyRL pickles its engines to other processes at each step, and runs them on whatever event loop is
there. So what is pickled are `FleetOptions`, and the client runs in a thread of its own.
"""

import asyncio
import atexit
import functools
import logging
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import UpdateMode
from rolloutbus.bus.wire.versions import parse_versions
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient, connect_sync
from rolloutbus.trainer_adapter.frameworks import fleet

_log = logging.getLogger(__name__)

T = TypeVar("T")


@strict()
@dataclass(frozen=True, kw_only=True)
class FleetOptions(fleet.FleetOptions):
    """Where a fleet is, and how SkyRL uses it."""

    versions: str = "latest"
    """What weights may sample, as of `RolloutClient.generate`."""
    mode: UpdateMode = "staged"
    """`overwrite` where there is no memory for a second copy of the weights."""
    http: str = ""
    """Base URL of the fleet's gateway, for those who ask an engine for an endpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = parse_versions(self.versions)
        if isinstance(rule, Problem):
            raise SettingsError(f"versions: {rule.message}")


class Link:
    """One client of a fleet, or of one worker of it; connected when it is first used."""

    def __init__(self, options: FleetOptions, worker: str) -> None:
        self._fleet = options
        self._worker = worker
        self._turn = threading.Lock()
        self._client: SyncRolloutClient | None = None

    @property
    def blocking(self) -> SyncRolloutClient:
        """The client for callers without an event loop.

        Raises:
            PeerLost: no router answers at the address.
            SettingsError: the address is not allowed without keys.
        """
        with self._turn:
            if self._client is None:
                options = self._fleet
                self._client = connect_sync(options.address, key_file=options.key_file).open()
                atexit.register(self.close)
            return self._client

    @property
    def client(self) -> RolloutClient:
        """The client whose coroutines `run` runs; raises as `blocking`."""
        return self.blocking.async_client

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine of `client`, from any event loop; cancelling cancels it."""
        return await asyncio.wrap_future(self.blocking.loop.submit(coroutine))

    def facts(self) -> dict[str, ServerFacts]:
        """What the engines of the policy's workers are, by worker; waits for them.

        Raises:
            SettingsError: no worker is there.
            BusError: as of `RolloutClient.server_info`.
        """
        policy, client = self._fleet.policy, self.blocking
        others = {each.name for each in client.status().workers if each.policy != policy}
        told = client.server_info(target=self._worker or FLEET).by_worker
        facts = {
            name: each
            for name, each in told.items()
            if isinstance(each, ServerFacts) and name not in others
        }
        if not facts:
            raise SettingsError(f"no worker of policy {policy!r} is there")
        return facts

    def end_pause(self) -> None:
        """Have workers sample that are paused, as a run that was killed leaves them; logs it."""
        for worker in self.blocking.status().workers:
            if worker.policy == self._fleet.policy and "paused" in worker.blocked_by:
                _log.warning("worker %s was left paused: it goes on now", worker.name)
                self.blocking.resume(target=worker.name)

    def close(self) -> None:
        """Disconnect: open requests stop. The next use connects again. Idempotent."""
        with self._turn:
            if self._client is not None:
                atexit.unregister(self.close)
                self._client.close()
                self._client = None


@functools.cache
def link_of(options: FleetOptions, worker: str = "") -> Link:
    """The link of this process to a fleet, or to one worker of it.

    An engine that was unpickled many times has one link all the same, and one that is aborted
    leaves the requests of the others alone.
    """
    return Link(options, worker)
