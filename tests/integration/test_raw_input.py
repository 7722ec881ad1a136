"""Entries made by hand and bytes that are no entries: refused or dropped, and nobody is harmed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import zmq
from msgspec import Raw

from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.wire.codec import SIGNATURE, pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.control import Pause, ServerInfo
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import DEADLINE_S, assert_fake_rollout, fake_sampling
from tests.integration.raw_client import PLACE, RawClient, generate_body

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 1, "engine": "fake", "transport": "tcp", "store": False}
PROMPT = [1, 2, 3]
GOOD: dict[str, Any] = {"prompt": np.array(PROMPT, "<i4").tobytes(), "sampling": {}}


@pytest_asyncio.fixture(loop_scope="module")
async def raw(fleet: Fleet) -> AsyncIterator[RawClient]:
    """One for each test: it sends no heartbeats, and is forgotten after 30 s."""
    async with RawClient(fleet.address) as connected:
        yield connected


async def assert_serves(client: RolloutClient) -> None:
    rollout = await client.generate(PROMPT, fake_sampling(8), deadline_s=DEADLINE_S)
    assert_fake_rollout(PROMPT, rollout, 8)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**GOOD, "colour": "red"}, "colour"),
        ({**GOOD, "sampling": {"heat": 1.0}}, "heat"),
        ({**GOOD, "prompt": [1, 2, 3]}, "prompt"),
        ({**GOOD, "prompt": b"abc"}, "prompt"),
        ({**GOOD, "prompt": bytes(4 * 1024 * 1024 + 4)}, "prompt"),
        ({**GOOD, "prompt": b"\xff\xff\xff\xff"}, "prompt"),
        ({"prompt": GOOD["prompt"]}, "sampling"),
        ([1, 2], ""),
    ],
    ids=[
        "unknown",
        "unknown inside",
        "type",
        "half a token",
        "oversized",
        "negative",
        "missing",
        "no map",
    ],
)
async def test_a_body_by_hand_that_breaks_its_type_is_refused_naming_the_field(
    client: RolloutClient, raw: RawClient, body: object, field: str
) -> None:
    rid = raw.next_rid()
    raw.generate(rid, Raw(msgspec.msgpack.encode(body)))
    problem = await raw.problem(rid)
    assert problem.code == "bad_request"
    assert field in f"{problem.field} {problem.message}"
    await assert_serves(client)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"kind": "dance"}, "unknown_message", ""),
        ({"deadline_ms": 0}, "bad_request", "deadline_ms"),
        ({"place": None}, "bad_request", "place"),
        ({"route": "worker:w0"}, "bad_request", "route"),
        ({"place": Placement("default", cost=-1)}, "bad_request", "place.cost"),
        ({"place": Placement("default", versions="?")}, "bad_request", "place.versions"),
    ],
)
async def test_an_entry_by_hand_with_a_bad_header_is_refused(
    client: RolloutClient,
    raw: RawClient,
    change: dict[str, Any],
    code: str,
    field: str,
) -> None:
    rid = raw.next_rid()
    body = generate_body(PROMPT, fake_sampling(8))
    good = Entry("generate", rid, deadline_ms=9_000, place=PLACE, body=body)
    raw.send(msgspec.structs.replace(good, **change))
    problem = await raw.problem(rid)
    assert (problem.code, problem.field) == (code, field)
    await assert_serves(client)


async def test_the_rid_of_another_client_is_refused(client: RolloutClient, raw: RawClient) -> None:
    for rid in ("raw_input/1", "raw/01", "raw/x", "raw/1@w0"):
        raw.generate(rid, generate_body(PROMPT, fake_sampling(8)))
        problem = await raw.problem(rid)
        assert (problem.code, problem.field) == ("bad_request", "rid")
    raw.say("server_info", "raw/1@w0", pack(ServerInfo()), route="fleet")
    await assert_serves(client)


async def test_a_control_command_by_hand_without_a_deadline_is_refused(
    client: RolloutClient, raw: RawClient
) -> None:
    rid = raw.next_rid()
    raw.send(Entry("pause", rid, route="fleet", body=pack(Pause())))
    assert (await raw.problem(rid)).field == "deadline_ms"
    await assert_serves(client)


def same_router(before: FleetStatus, after: FleetStatus) -> bool:
    return (before.instance, before.router_epoch) == (after.instance, after.router_epoch)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [SIGNATURE],
        [SIGNATURE + b"\xc1\xc1\xc1"],
        [SIGNATURE + b"\xdd\xff\xff\xff\xff"],
        [SIGNATURE + b"\x91" * 5000],
        [b"RB\x63" + msgspec.msgpack.encode([])],
        [SIGNATURE + msgspec.msgpack.encode([Entry("hello")])],
        [SIGNATURE + msgspec.msgpack.encode([Entry("beat")])],
        [SIGNATURE + msgspec.msgpack.encode([Entry("generate")]), b"two", b"three"],
    ],
    ids=[
        "empty",
        "no signature",
        "nothing after it",
        "no MessagePack",
        "four billion entries",
        "5000 lists deep",
        "another version",
        "a hello without a body",
        "a heartbeat of nobody",
        "too many frames",
    ],
)
async def test_garbage_on_a_socket_harms_nobody_else(
    client: RolloutClient, fleet: Fleet, frames: list[bytes]
) -> None:
    before = await client.status()
    with zmq.Context() as context:
        for endpoint in (fleet.address, fleet.backend):
            with context.socket(zmq.DEALER) as rude:
                rude.connect(endpoint)
                rude.send_multipart(frames)
                rude.close(linger=1000)
    await assert_serves(client)
    assert same_router(before, await client.status())


async def test_a_web_request_to_the_router_harms_nobody(
    client: RolloutClient, fleet: Fleet
) -> None:
    before = await client.status()
    for endpoint in (fleet.address, fleet.backend):
        address = urlsplit(endpoint)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: router\r\n\r\n" + b"x" * 65_536)
        await assert_serves(client)
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the router has hung up
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await assert_serves(client)
    assert same_router(before, await client.status())
