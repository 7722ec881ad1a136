"""Guarded sockets in one process: who comes in, who is cut off, and that the proof notices."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from rolloutbus.bus.security.key_files import read_allow_list, read_key_pair, write_public_key
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.principals import Principal, by_key
from rolloutbus.bus.security.zmq_curve import Dialer, dialer_of, dress_client, new_key_pair
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard, prove
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.transport.zmq_ports import DealerPort, RouterPort
from rolloutbus.bus.transport.zmq_sockets import bind_anywhere, new_socket
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.codec import encode_batch, pack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import SecurityError, SettingsError
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, Changes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ANY = "tcp://127.0.0.1:0"
BEAT = Entry("client_beat", body=pack(ClientHeartbeat(1)))


class Heard:
    """What a test waits for."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Entry]] = []
        self._changes = Changes()

    def add(self, who: str, entries: list[Entry]) -> None:
        self.items += [(who, entry) for entry in entries]
        self._changes.notify()

    async def until(self, is_so: Callable[[], bool]) -> None:
        await self._changes.until(is_so)

    async def seqs_of(self, who: str, *wanted: str) -> None:
        await self.until(lambda: {e.rid for w, e in self.items if w == who} >= set(wanted))


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    keys = KeyDirectory(tmp_path)
    keys.make_unlisted("router")
    for name in ("ann", "bob"):
        keys.add(name, "client")
    return keys


@asynccontextmanager
async def guarded(
    keys: KeyDirectory, heard: Heard
) -> AsyncGenerator[tuple[SocketGuard, RouterPort]]:
    guard = SocketGuard(keys.server_settings("router"))

    def hear(_: Peer, principal: Principal, entries: list[Entry]) -> None:
        heard.add(principal.name, entries)

    port = RouterPort([ANY], unsigned, doorways=[Doorway(guard, "frontend", hear)])
    try:
        yield guard, port
    finally:
        port.close()
        guard.close()


def dialer(keys: KeyDirectory, name: str) -> Dialer:
    made = dialer_of(keys.client_settings(name))
    assert made is not None
    return made


def unsigned(_: Peer, __: list[Entry]) -> None:
    raise AssertionError("a guarded endpoint has no unsigned entries")


def unheard(_: list[Entry]) -> None:
    """Nothing is answered."""


async def test_entries_arrive_under_the_name_of_the_key_that_sent_them(keys: KeyDirectory) -> None:
    heard = Heard()
    async with guarded(keys, heard) as (_, port):
        for name in ("ann", "bob"):
            link = DealerPort(port.endpoints[0], unheard, dialer=dialer(keys, name))
            link.send(Entry("status", f"{name}/1"))
            await heard.seqs_of(name, f"{name}/1")
            link.close()
    assert {who for who, _ in heard.items} == {"ann", "bob"}


async def test_unknown_key_and_plain_socket_are_dropped_while_others_are_served(
    keys: KeyDirectory,
) -> None:
    heard = Heard()
    keys.make_unlisted("eve")
    async with guarded(keys, heard) as (_, port):
        endpoint = port.endpoints[0]
        gone = [asyncio.Event(), asyncio.Event()]
        links = [
            DealerPort(endpoint, unheard, gone[0].set, dialer=dialer(keys, "eve")),
            DealerPort(split_key(endpoint)[0], unheard, gone[1].set),
        ]
        for link in links:
            link.send(BEAT)
        async with asyncio.timeout(DEADLINE_S):
            await gone[0].wait()
            await gone[1].wait()
        known = DealerPort(endpoint, unheard, dialer=dialer(keys, "ann"))
        known.send(Entry("status", "ann/1"))
        await heard.seqs_of("ann", "ann/1")
        for link in (*links, known):
            link.close()
    assert {who for who, _ in heard.items} == {"ann"}


async def test_stolen_routing_id_says_nothing_under_another_key(keys: KeyDirectory) -> None:
    heard = Heard()
    routing_id = b"\x01" + secrets.token_bytes(15)
    async with guarded(keys, heard) as (_, port):
        address, server_key = split_key(port.endpoints[0])

        def connect(name: str) -> zmq.Socket[bytes]:
            socket = new_socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
            dress_client(socket, read_key_pair(keys.file(name)), server_key)
            socket.connect(address)
            return socket

        owner = connect("ann")
        owner.send(encode_batch([Entry("status", "ann/1")]))
        await heard.seqs_of("ann", "ann/1")
        owner.close()
        # Until libzmq has seen the owner go, the thief's link is deaf; so it tries again.
        async with asyncio.timeout(DEADLINE_S):
            while port.counters.foreign_in == 0:
                thief = connect("bob")
                thief.send(encode_batch([Entry("status", "bob/1")]))
                await asyncio.sleep(0.1)  # for a message that must not arrive there is no event
                thief.close()
    assert [entry.rid for _, entry in heard.items] == ["ann/1"]


async def test_revoked_key_is_not_heard_on_its_open_connection(keys: KeyDirectory) -> None:
    heard = Heard()
    revoked = asyncio.Event()
    async with guarded(keys, heard) as (guard, port):

        def tell(_: frozenset[str]) -> None:
            revoked.set()

        guard.on_revoked = tell
        ann = DealerPort(port.endpoints[0], unheard, dialer=dialer(keys, "ann"))
        bob = DealerPort(port.endpoints[0], unheard, dialer=dialer(keys, "bob"))
        for name, link in (("ann", ann), ("bob", bob)):
            link.send(Entry("status", f"{name}/1"))
            await heard.seqs_of(name, f"{name}/1")
        keys.revoke("ann")
        async with asyncio.timeout(DEADLINE_S):
            await revoked.wait()
        ann.send(Entry("status", "ann/2"))
        bob.send(Entry("status", "bob/2"))
        await heard.seqs_of("bob", "bob/2")
        async with asyncio.timeout(DEADLINE_S):
            while port.counters.foreign_in == 0:  # noqa: ASYNC110 - a counter is no event
                await asyncio.sleep(0.01)
        ann.close()
        bob.close()
    assert [e.rid for who, e in heard.items if who == "ann"] == ["ann/1"]


async def test_connection_of_a_revoked_key_is_closed_though_it_keeps_silent(
    keys: KeyDirectory,
) -> None:
    heard = Heard()
    async with guarded(keys, heard) as (_, port):
        gone = {"ann": asyncio.Event(), "bob": asyncio.Event()}
        links = {
            name: DealerPort(port.endpoints[0], unheard, gone[name].set, dialer=dialer(keys, name))
            for name in gone
        }
        for name, link in links.items():
            link.send(Entry("status", f"{name}/1"))
            await heard.seqs_of(name, f"{name}/1")
        keys.revoke("ann")
        async with asyncio.timeout(DEADLINE_S):
            await gone["ann"].wait()
        links["bob"].send(Entry("status", "bob/2"))
        await heard.seqs_of("bob", "bob/2")
        assert not gone["bob"].is_set()
        for link in links.values():
            link.close()


async def test_port_without_a_lock_stays_on_this_machine_unless_it_is_called_unsafe() -> None:
    with pytest.raises(SettingsError, match="without keys"):
        PubPort("tcp://*:0")
    with pytest.raises(SettingsError, match="without keys"):
        RouterPort(["tcp://*:0"], unsigned)
    PubPort("tcp://*:0", is_unsafe=True).close()


async def test_locks_that_work_are_proven(keys: KeyDirectory) -> None:
    async with guarded(keys, Heard()) as (guard, _):
        pub = PubPort(ANY, Doorway(guard, "stream"))
        await guard.prove()
        pub.close()


async def test_nobody_comes_in_when_the_check_of_keys_is_dead_and_the_proof_says_so(
    keys: KeyDirectory,
) -> None:
    heard = Heard()
    async with guarded(keys, heard) as (guard, port):
        guard.zap.close()
        gone = asyncio.Event()
        link = DealerPort(port.endpoints[0], unheard, gone.set, dialer=dialer(keys, "ann"))
        link.send(BEAT)
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        link.close()
        with pytest.raises(SecurityError, match="lets nobody in"):
            await guard.prove()
        with pytest.raises(SecurityError, match="lets nobody in"):
            await guard.while_proven(asyncio.get_running_loop().create_future(), every_s=0.0)
    assert heard.items == []


async def test_lock_that_lets_strangers_in_is_noticed() -> None:
    server, known = new_key_pair("server"), new_key_pair("known")
    socket = new_socket(zmq.ROUTER)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, server.reveal())
    address = bind_anywhere(socket, ANY)
    with pytest.raises(SecurityError, match="unknown key"):
        await prove(address, zmq.DEALER, server.public, known)
    socket.close()


async def test_work_that_ends_ends_its_proving(keys: KeyDirectory) -> None:
    async def work() -> str:
        return "done"

    async with guarded(keys, Heard()) as (guard, _):
        assert await guard.while_proven(work()) == "done"


async def test_dialer_finds_the_right_one_of_two_server_keys_and_stays_with_it(
    keys: KeyDirectory,
) -> None:
    heard = Heard()
    other = keys.make_unlisted("other")
    async with guarded(keys, heard) as (guard, port):
        address = split_key(port.endpoints[0])[0]
        made = dialer_of(keys.client_settings("ann", other, guard.public))
        assert made is not None
        gone = asyncio.Event()
        wrong = DealerPort(address, unheard, gone.set, dialer=made)
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        wrong.close()
        right = DealerPort(address, unheard, dialer=made)
        right.send(Entry("status", "ann/1"))
        await heard.seqs_of("ann", "ann/1")
        right.close()


async def test_dialer_looks_a_routers_key_up_again_for_every_connection(keys: KeyDirectory) -> None:
    heard = Heard()
    file = keys.directory / "router.pub"
    async with guarded(keys, heard) as (guard, port):
        write_public_key(file, keys.make_unlisted("other"))
        settings = msgspec.structs.replace(keys.client_settings("ann"), server_key_file=str(file))
        made = dialer_of(settings)
        assert made is not None
        gone = asyncio.Event()
        address = split_key(port.endpoints[0])[0]
        wrong = DealerPort(address, unheard, gone.set, dialer=made)
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        wrong.close()
        write_public_key(file, guard.public)
        right = DealerPort(address, unheard, dialer=made)
        right.send(Entry("status", "ann/1"))
        await heard.seqs_of("ann", "ann/1")
        right.close()


async def test_a_member_without_a_list_lets_nobody_in_until_one_is_handed_over(
    keys: KeyDirectory,
) -> None:
    keys.make_unlisted("w0")
    guard = SocketGuard(SecuritySettings(key_file=str(keys.file("w0"))))
    publisher = PubPort(ANY, Doorway(guard, "stream"))
    address, key = split_key(publisher.endpoint)
    ann, bob = read_key_pair(keys.file("ann")), read_key_pair(keys.file("bob"))
    principals = by_key(read_allow_list(keys.allow_list))
    try:
        await guard.prove()
        with pytest.raises(SecurityError, match="lets nobody in"):
            await prove(address, zmq.SUB, key, ann)
        guard.hand_over(principals)
        await prove(address, zmq.SUB, key, ann)
        guard.hand_over({bob.public: principals[bob.public]})
        await prove(address, zmq.SUB, key, bob)
        with pytest.raises(SecurityError, match="lets nobody in"):
            await prove(address, zmq.SUB, key, ann)
    finally:
        publisher.close()
        guard.close()
