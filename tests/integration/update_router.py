"""Stands in for the router where versions are published; it has no workers."""

import asyncio
from collections.abc import Callable, Sequence

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.wire.errors import RequestCancelled
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.bus.wire.messages.weights import (
    PublishVersion,
    RecordCommit,
    UpdateProgress,
    VersionPublished,
)
from rolloutbus.trainer_adapter.client.commands import FleetRef
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.core.link import Upstream
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings


class UpdateRouter:
    """Updates are decided as soon as `decides` is set; until then they may be aborted."""

    def __init__(self, ref: Callable[[str], FleetRef]) -> None:
        """`ref` gives out the store's."""
        self._ref = ref
        self._n_asked = 0
        self._updates: dict[str, asyncio.Task[Result]] = {}
        self.published: list[PublishVersion] = []
        """What this router was told to publish."""
        self.listeners: list[Callable[[UpdateProgress], None]] = []
        """Who hears how far each of them has come."""
        self.asked = asyncio.Event()
        """Set when it has been."""
        self.committed: list[int] = []
        self.decides = asyncio.Event()
        self.decides.set()
        self.members: list[Member] = []
        self.settings = ClientSettings("test", "ipc:///router")

    @property
    def upstream(self) -> Upstream:
        return Upstream("test", "")

    def submit(
        self,
        ask: Ask,
        deadline_s: float,
        listener: Callable[[UpdateProgress], None] | None = None,
    ) -> tuple[str, asyncio.Future[Result]]:
        assert isinstance(ask.body, PublishVersion)
        assert listener is not None
        self._n_asked += 1
        rid = f"test/{self._n_asked}"
        self.listeners.append(listener)
        listener(UpdateProgress(ask.body.version, "preparing", n_targets=2, n_prepared=1))
        self._updates[rid] = asyncio.create_task(self._update(ask.body, deadline_s))
        return rid, asyncio.ensure_future(self._ending_of(rid))

    def require_home(self) -> None:
        """Any loop will do."""

    @property
    def fleet(self) -> str:
        return "test"

    def require_known_fleet(self) -> None:
        """There is one fleet."""

    def require_fleet(self, fleet: str) -> None:
        assert fleet in ("", self.fleet)

    def abort(self, rids: Sequence[str]) -> int:
        """Too late for those that are decided."""
        held = [rid for rid in rids if rid in self._updates and not self.decides.is_set()]
        for rid in held:
            self._updates[rid].cancel()
        return len(held)

    def forget(self, rid: str) -> None:
        self._updates.pop(rid, None)

    async def _update(self, body: PublishVersion, deadline_s: float) -> Result:
        self.published.append(body)
        self.asked.set()
        await self.decides.wait()
        commit = RecordCommit(body.policy, body.version)
        await self._ref(STORE).ask(commit, deadline_s=deadline_s)
        self.committed.append(body.version)
        return VersionPublished(version=body.version, workers=[])

    async def _ending_of(self, rid: str) -> Result:
        update = self._updates[rid]
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            if not update.cancelled():
                raise
            raise RequestCancelled(Problem("cancelled", "aborted", "unknown"), rid=rid) from None
