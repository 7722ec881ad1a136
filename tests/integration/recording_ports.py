"""Records all messages through the sockets of one peer; waits until two peers received the same."""

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from rolloutbus import Rollout, RolloutClient
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.ports import (
    BatchHandler,
    DownHandler,
    LinkPort,
    SubscriptionPort,
    TopicBatchHandler,
)
from rolloutbus.bus.wire.codec import topic_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.replay.choice import rids_in
from rolloutbus.trainer_adapter.client.connection import Ports, ports_of
from tests.integration.live_fleet import DEADLINE_S, fake_sampling

CLIENT = "trainer"
"""Whose requests are recorded."""
ONCE = LeaseSettings(
    lease_s=2 * DEADLINE_S,
    holder_s=1.6 * DEADLINE_S,
    recovery_s=2 * DEADLINE_S + 1,
    silence_s=1.5 * DEADLINE_S,
    resend_first_s=1.5 * DEADLINE_S,
    resend_max_s=1.5 * DEADLINE_S,
)
"""Of a fleet and its clients where each message is sent once, over one connection, however late it
is answered: what was sent is what was received."""


class RecordingPorts:
    """Real sockets of one peer; keeps each message that is sent or received."""

    def __init__(self, security: SecuritySettings | None = None) -> None:
        self._sockets = ports_of(dialer_of(security))
        self.sent: list[Entry] = []
        self.received: list[Entry] = []
        self.published: list[tuple[bytes, Entry]] = []
        """(topic, entry)."""
        self.workers: set[str] = set()
        """Workers whose rows for the client were received."""
        self.receives_tap = False
        self._kinds: dict[str, set[str]] = {}
        """rid -> kinds of the entries that spoke of it."""
        self._changes = asyncio.Event()
        self.ports = Ports(self._link, self._subscription)

    async def until(self, is_so: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Wait until `is_so`, judged after each message."""
        async with asyncio.timeout(deadline_s):
            while not is_so():
                self._changes.clear()
                await self._changes.wait()

    def rows(self, rids: AbstractSet[str]) -> dict[str, list[Entry]]:
        """Worker -> its messages about any of these requests."""
        found: dict[str, list[Entry]] = {}
        for topic, entry in self.published:
            is_row = entry.kind == "deltas" and topic == topic_of(CLIENT)
            if is_row and rids & rids_in(entry):
                found.setdefault(entry.route, []).append(entry)
        return found

    def reset_subscriptions(self) -> None:
        """Forget which subscriptions took effect; new ones need new proof."""
        self.workers.clear()
        self.receives_tap = False

    def hears_of(self, rid: str, worker: str) -> bool:
        """Whether a worker's subscription brought word of a request, be it that it waits."""
        return any(entry.route == worker and rid in rids_in(entry) for _, entry in self.published)

    def kinds(self) -> list[str]:
        """Kinds of the messages from the router."""
        return [entry.kind for entry in self.received]

    def knows_the_end_of(self, rid: str) -> bool:
        """Whether its row has come, and its ending, from the tap or from the router itself."""
        return {"deltas", "finished"} <= self._kinds.get(rid, set())

    def _note(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for rid in rids_in(entry):
                self._kinds.setdefault(rid, set()).add(entry.kind)
        self._changes.set()

    def _link(self, endpoint: str, on_batch: BatchHandler, on_down: DownHandler) -> LinkPort:
        def heard(entries: list[Entry]) -> None:
            self.received += entries
            on_batch(entries)
            self._note(entries)

        return _RecordingLink(self._sockets.link(endpoint, heard, on_down), self.sent)

    def _subscription(
        self, on_batch: TopicBatchHandler, clients: Sequence[str]
    ) -> SubscriptionPort:
        def heard(topic: bytes, entries: list[Entry]) -> None:
            self.published += [(topic, entry) for entry in entries]
            self.receives_tap |= len(topic) != len(topic_of(CLIENT))
            if topic == topic_of(CLIENT):
                self.workers.update(entry.route for entry in entries if entry.kind == "deltas")
            on_batch(topic, entries)
            self._note(entries)

        return self._sockets.subscription(heard, clients)


class _RecordingLink:
    """Keeps what is sent."""

    def __init__(self, link: LinkPort, sent: list[Entry]) -> None:
        self.counters = link.counters
        self._link = link
        self._sent = sent

    def send(self, entry: Entry) -> None:
        self._sent.append(entry)
        self._link.send(entry)

    def close(self, *, linger_ms: int = 0) -> None:
        self._link.close(linger_ms=linger_ms)


async def sample_until_both_received(
    client: RolloutClient, recorded: RecordingPorts, own: RecordingPorts, n_workers: int = 2
) -> None:
    """Sample on each worker until both have received the rollout, and so all that came before."""

    async def sample(worker: str) -> Rollout:
        return await client.generate([1], fake_sampling(1), worker=worker, deadline_s=DEADLINE_S)

    async with asyncio.timeout(DEADLINE_S):
        # A subscription takes effect some time after it is made.
        while not recorded.receives_tap or min(len(recorded.workers), len(own.workers)) < n_workers:
            # A router that has just started knows none of them.
            await own.until(lambda: len(client.connection.members) >= n_workers)
            for each in client.connection.members:
                await sample(each.name)
        served = {name: (await sample(name)).rid for name in own.workers}
    for rid in served.values():
        await recorded.until(lambda rid=rid: recorded.knows_the_end_of(rid))
        await own.until(lambda rid=rid: own.knows_the_end_of(rid))
