"""Garbage over HTTP: every request is answered or cut off, and the fleet does not notice."""

import asyncio
import json
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import pytest
import pytest_asyncio

from rolloutbus import Fleet, RolloutClient
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, PACE_S, status_when
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"engine": "fake", "workers": 1, "store": False}
AT_ONCE = 100
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
FIELDS = ["input_ids", "text", "rid", "sampling_params", "stream", "versions", "lora_path", "n"]
VALUES: list[Any] = [None, [], {}, 1e308, "x" * 1000, [[]], [None], -1, True, {"n": 1e9}, [2**70]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet) -> AsyncIterator[Gateway]:
    async with gateway("--address", fleet.address) as running:
        yield running


def with_length(body: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def wrong_types(rng: random.Random) -> bytes:
    n_fields = rng.randrange(1, 4)
    fields = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(n_fields)}
    return with_length(json.dumps(fields).encode())


KINDS: list[Callable[[random.Random], bytes]] = [
    lambda rng: rng.randbytes(rng.randrange(1, 4000)),
    lambda rng: with_length(rng.randbytes(rng.randrange(1, 4000))),
    lambda _: with_length(b'{"input_ids": [1,'),
    wrong_types,
    lambda rng: b"GET /" + bytes(rng.choices(b"abc/..%00?&=", k=50)) + b" HTTP/1.1\r\n\r\n",
    lambda _: HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    lambda _: HEAD + b"Content-Length: 99999999999\r\n\r\n{",
    lambda _: b"X" * 70_000,
]


async def outcome(served: Gateway, sent: bytes) -> str:
    """The status, or that the connection was cut."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        writer.write_eof()
        head = await reader.read(12)
    except OSError:  # ENOTCONN, where it was cut off before the end of what is sent, has no class
        head = b""
    finally:
        writer.close()
    return head[9:12].decode("latin-1") or "cut off"


async def test_garbage_is_answered_or_cut_off(
    served: Gateway, rng: random.Random, *, is_exhaustive: bool
) -> None:
    seen: Counter[str] = Counter()
    async with asyncio.timeout(3 * DEADLINE_S):
        for _ in range(10_000 // AT_ONCE if is_exhaustive else 10):
            garbage = [rng.choice(KINDS)(rng) for _ in range(AT_ONCE)]
            seen.update(await asyncio.gather(*(outcome(served, each) for each in garbage)))
    assert set(seen) <= {"200", "400", "404", "405", "413", "cut off"}, seen
    assert seen["400"] > 0
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert len((await served.ask("POST", "/generate", body)).json["output_ids"]) == 4


async def test_a_reader_that_takes_nothing_is_cut_off(fleet: Fleet) -> None:
    sampling = {"max_new_tokens": 5000, "ignore_eos": True}
    body = {"input_ids": [1], "stream": True, "sampling_params": sampling}
    async with gateway("--address", fleet.address, "--stall", "0.5") as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        with socket.socket() as reader:
            reader.connect((host, int(port)))
            reader.sendall(with_length(json.dumps(body).encode()))
            assert await asyncio.to_thread(reader.recv, 1)
            alone = b"rolloutbus_gateway_open_requests 1.0"  # the one that asks
            async with asyncio.timeout(DEADLINE_S):
                while alone not in (await running.ask("GET", "/metrics")).body:  # noqa: ASYNC110
                    await asyncio.sleep(PACE_S)  # it tells nobody


async def test_a_refused_prompt_ends_its_batch_and_does_not_wait_for_the_others(
    served: Gateway, client: RolloutClient, token_limit: TokenLimit
) -> None:
    sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    with token_limit.at(1):
        async with asyncio.timeout(DEADLINE_S):
            refused = await served.ask(
                "POST",
                "/generate",
                {"input_ids": [[1], [1] * ENDLESS], "sampling_params": sampling},
            )
        assert refused.status == 400
        assert "exceed the engine's context" in refused.json["error"]["message"]
        await status_when(client, lambda status: status.n_running + status.n_queued == 0)


async def test_a_reader_that_takes_nothing_keeps_no_gateway_from_its_end(fleet: Fleet) -> None:
    many = {"max_new_tokens": 5000, "ignore_eos": True}
    body = {"input_ids": [[1]] * 64, "return_logprob": True, "sampling_params": many}
    large = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    first = head + f"Content-Length: {len(large)}\r\n\r\n".encode() + large
    async with gateway("--address", fleet.address, "--drain", "0") as ending:
        host, _, port = ending.url.removeprefix("http://").partition(":")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(first + with_length(large)[:-1])  # the second one is never whole
            assert await asyncio.to_thread(reader.recv, 1)
            ending.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S / 2):
                await ending.process.wait()


async def test_who_asks_a_gateway_that_ends_without_its_fleet_is_sent_elsewhere(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    body = {"input_ids": [1], "sampling_params": sampling}
    with token_limit.at(1):
        async with gateway("--address", fleet.address, "--drain", "0") as ending:
            asking = asyncio.create_task(ending.ask("POST", "/generate", body))
            await status_when(client, lambda status: status.n_running == 1)
            os.kill(fleet.pids["router"], signal.SIGSTOP)
            try:
                ending.process.send_signal(signal.SIGTERM)
                reply = await asking
            finally:
                os.kill(fleet.pids["router"], signal.SIGCONT)
    assert reply.status == 503
    assert reply.headers["content-type"] == "application/json"
    assert "ask another gateway" in reply.json["error"]["message"]


async def test_a_stream_that_its_gateway_cuts_off_says_so(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    body = {"input_ids": [1], "sampling_params": sampling, "stream": True}
    with token_limit.at(1):
        async with gateway("--address", fleet.address, "--drain", "0") as ending:
            reader, writer = await ending.open("POST", "/generate", json.dumps(body).encode())
            with closing(writer):
                async with asyncio.timeout(DEADLINE_S):
                    await reader.readuntil(b"data: ")
                os.kill(fleet.pids["router"], signal.SIGSTOP)
                try:
                    ending.process.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(DEADLINE_S):
                        rest = await reader.read()
                finally:
                    os.kill(fleet.pids["router"], signal.SIGCONT)
    assert b'"error":{"message":"this gateway ends, and what became' in rest
    assert b"[DONE]" not in rest
    assert rest.endswith(b"\r\n0\r\n\r\n")  # the answer is whole
