"""A guarded publisher: whose rows a key gets to see, and for how long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from rolloutbus.bus.security.principals import claim_of
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.security.zmq_guard import MAX_ASKED
from rolloutbus.bus.transport.zmq_sockets import Monitor, new_socket
from rolloutbus.bus.wire.codec import topic_of
from tests.integration.guarded_publisher import GuardedPublisher
from tests.integration.key_directory import KeyDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ANY_PORT = "tcp://127.0.0.1:0"
N_ATTACKS = 20


class Raw:
    """A socket to break rules with; it never connects again by itself."""

    def __init__(self, kind: int, dialer: Dialer, endpoint: str) -> None:
        self.socket = new_socket(kind)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.cut = asyncio.Event()
        self._monitor = Monitor(self.socket, zmq.EVENT_DISCONNECTED, lambda _: self.cut.set())
        self.socket.connect(dialer.dress(self.socket, endpoint))
        self._topics: list[bytes] = []

    def ask(self, *texts: bytes) -> None:
        for text in texts:
            self.socket.setsockopt(zmq.SUBSCRIBE, text)

    @property
    def topics(self) -> list[bytes]:
        """Of all rows that have come."""
        while not self.socket.closed and self.socket.poll(0):
            self._topics.append(self.socket.recv_multipart()[0])
        return self._topics

    def close(self) -> None:
        self._monitor.close()
        self.socket.close()


class RawGuardedPublisher(GuardedPublisher):
    """With readers that break rules."""

    def __init__(self, keys: KeyDirectory, endpoint: str) -> None:
        super().__init__(keys, endpoint)
        self._raws: list[Raw] = []

    def raw(self, name: str, kind: int = zmq.SUB) -> Raw:
        """A socket under a key."""
        raw = Raw(kind, self.dialer(name), self.pub.endpoint)
        self._raws.append(raw)
        return raw

    def close(self) -> None:
        for raw in self._raws:
            raw.close()
        super().close()


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    keys = KeyDirectory(tmp_path)
    keys.make_unlisted("w0")
    for name in ("ann", "bob"):
        keys.add(name, "client")
    keys.add("tom", "trainer")
    keys.add("watcher", "subscriber")
    return keys


@asynccontextmanager
async def guarded_publisher(
    keys: KeyDirectory, endpoint: str = ANY_PORT
) -> AsyncGenerator[RawGuardedPublisher]:
    made = RawGuardedPublisher(keys, endpoint)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", ["ann", "tom"])
async def test_clients_and_trainers_get_their_own_rows_and_no_others(
    keys: KeyDirectory, name: str
) -> None:
    async with guarded_publisher(keys) as made:
        # In this order: once the last is granted, the others have been judged.
        rows = made.read(name, "bob", f"{name}-2", name)
        await made.until(lambda: (name, made.n_published) in rows, "bob", name)
        last = made.publish("bob", f"{name}-2", name)
        await made.until(lambda: (name, last) in rows, name)
        assert {whose for whose, _ in rows} == {name, f"{name}-2"}
        assert made.pub.counters.foreign_in >= 1


async def test_subscribers_get_everything_or_what_they_choose(keys: KeyDirectory) -> None:
    keys.add("picky", "subscriber")
    async with guarded_publisher(keys) as made:
        everything, chosen = made.read("watcher"), made.read("picky", "bob")
        await made.until(lambda: bool(everything and chosen), "ann", "bob")
        last = made.publish("ann", "bob")
        await made.until(lambda: ("bob", last) in everything and ("bob", last) in chosen, "bob")
        assert ("ann", last - 1) in everything
        assert {whose for whose, _ in chosen} == {"bob"}


@pytest.mark.parametrize("asked", [b"", topic_of("bob"), topic_of("bob")[:1]], ids=len)
async def test_a_client_that_asks_for_digests_gets_nothing(
    keys: KeyDirectory, asked: bytes
) -> None:
    async with guarded_publisher(keys) as made:
        raw = made.raw("ann")
        raw.ask(asked, claim_of("ann"), topic_of("ann"))
        await made.until(lambda: topic_of("ann") in raw.topics, "bob", "ann")
        made.publish("bob")
        n_before = len(raw.topics)
        await made.until(lambda: len(raw.topics) > n_before, "ann")
        assert set(raw.topics) == {topic_of("ann")}


async def test_a_subscription_that_is_taken_back_ends(keys: KeyDirectory) -> None:
    async with guarded_publisher(keys) as made:
        raw = made.raw("ann", zmq.XSUB)  # which shows all that comes
        for name in ("ann", "ann-2"):
            raw.socket.send(b"\1" + claim_of(name))
        await made.until(lambda: len(set(raw.topics)) == 2, "ann", "ann-2")
        raw.socket.send(b"\0" + claim_of("ann"))
        await made.until(lambda: raw.topics[-2:] == [topic_of("ann-2")] * 2, "ann", "ann-2")


@pytest.mark.parametrize("endpoint", [ANY_PORT, "ipc://{0}/s"])
async def test_revoked_subscriber_is_cut_off_and_the_others_miss_nothing(
    keys: KeyDirectory, endpoint: str
) -> None:
    async with guarded_publisher(keys, endpoint.format(keys.directory)) as made:
        ann, watcher = made.read("ann", "ann"), made.read("watcher")
        raw = made.raw("ann")
        raw.ask(claim_of("ann"))
        await made.until(lambda: bool(ann and watcher), "ann")
        keys.revoke("ann")
        await made.until(raw.cut.is_set, "ann")
        n_refused = made.guard.n_refused
        await made.until(lambda: made.guard.n_refused > n_refused, "ann")  # the other one is back
        last = made.publish("ann")
        await made.until(lambda: ("ann", last) in watcher, "ann")
        assert ("ann", last) not in ann
        numbers = [number for _, number in watcher]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


async def test_a_key_with_other_rights_than_before_is_judged_again(keys: KeyDirectory) -> None:
    async with guarded_publisher(keys) as made:
        rows = made.read("watcher", "bob", "watcher")
        await made.until(lambda: len({whose for whose, _ in rows}) == 2, "bob", "watcher")
        keys.change_role("watcher", "client")
        await made.until(lambda: made.pub.counters.foreign_in >= 1, "bob", "watcher")
        last = made.publish("bob", "watcher")
        await made.until(lambda: rows[-1][1] > last, "watcher")
        assert ("bob", last - 1) not in rows


async def test_messages_of_a_subscriber_do_not_win_it_the_grants_of_others(
    keys: KeyDirectory,
) -> None:
    async with guarded_publisher(keys) as made:
        for _ in range(N_ATTACKS):
            thief, victim = made.raw("bob", zmq.XSUB), made.raw("ann", zmq.XSUB)
            for raw, name in ((thief, "bob"), (victim, "ann")):
                raw.socket.send(b"\1" + claim_of(name))
            await made.until(lambda t=thief, v=victim: t.topics and v.topics, "ann", "bob")  # type: ignore[misc]
            thief.socket.send(b"what no subscriber sends")
            victim.socket.send(b"\1" + claim_of("ann-2"))
            thief.socket.send(b"\1" + claim_of("bob-2"))
            await made.until(thief.cut.is_set, "ann-2")
            assert set(thief.topics) == {topic_of("bob")}
            thief.close()
            victim.close()
        assert made.pub.counters.malformed_in >= N_ATTACKS


async def test_a_subscriber_that_asks_on_and_on_is_cut_off(keys: KeyDirectory) -> None:
    async with guarded_publisher(keys) as made:
        rows = made.read("watcher")
        raw = made.raw("ann")
        raw.ask(*(b"%d" % n for n in range(MAX_ASKED + 1)))
        await made.until(raw.cut.is_set, "ann")
        last = made.publish("ann")
        await made.until(lambda: ("ann", last) in rows, "ann")


async def test_subscriber_that_came_before_its_key_was_known_gets_in_later(
    keys: KeyDirectory,
) -> None:
    async with guarded_publisher(keys) as made:
        public = keys.make_unlisted("cyd")
        rows = made.read("cyd")
        await made.until(lambda: made.guard.n_refused > 0)
        keys.allow("cyd", public, "subscriber")
        await made.until(lambda: bool(rows), "ann")
