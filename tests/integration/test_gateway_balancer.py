"""Two gateways of one fleet behind HAProxy, by the configuration that we ship."""

import asyncio
import re
import shutil
import socket
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import Fleet
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy" / "gateways.cfg"
FLEET: UpOptions = {"workers": 1, "engine": "fake", "store": False}
STOPPED_BY_CTRL_C = 130
N_IDS = 24
"""So many ids go to one of two gateways with a chance of 2 to the power of -23."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(fleet: Fleet) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        arguments = ("--address", fleet.address)
        yield [await stack.enter_async_context(gateway(*arguments)) for _ in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def balanced(
    gateways: list[Gateway], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """The balancer, asked like one gateway."""
    haproxy = shutil.which("haproxy")
    if haproxy is None:
        pytest.skip("there is no haproxy: apt install haproxy")
    text = CONFIG.read_text()
    for port, each in zip((8001, 8002), gateways, strict=True):
        text, n_found = re.subn(f"127.0.0.1:{port}", each.url.removeprefix("http://"), text)
        assert n_found == 1
    with socket.create_server(("127.0.0.1", 0)) as bound:
        text, n_found = re.subn("bind 127.0.0.1:8000", f"bind fd@{bound.fileno()}", text)
        assert n_found == 1
        path = tmp_path_factory.mktemp("haproxy") / "gateways.cfg"
        path.write_text(text)
        process = await asyncio.create_subprocess_exec(
            *(haproxy, "-db", "-f", path), stderr=PIPE, pass_fds=[bound.fileno()]
        )
        yield Gateway(process, "http://{}:{}".format(*bound.getsockname()))
        assert process.returncode is None, await process.communicate()
        process.kill()
        await process.communicate()


async def answers(balanced: Gateway, header: str) -> list[str]:
    """The bus's name of each answered request, one for each value of the header."""

    async def one(i: int) -> str:
        reply = await balanced.ask(
            "POST",
            "/generate",
            {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}},
            headers={header: f"t{i}"},
        )
        assert reply.status == 200, reply.body
        return reply.json["meta_info"]["id"]

    async with asyncio.timeout(DEADLINE_S):
        return list(await asyncio.gather(*[one(i) for i in range(N_IDS)]))


async def test_a_repeated_request_finds_its_first_try_though_there_are_two_gateways(
    gateways: list[Gateway], balanced: Gateway
) -> None:
    first = await answers(balanced, "x-request-id")
    assert len(set(first)) == N_IDS
    assert await answers(balanced, "x-request-id") == first
    for each in gateways:
        counted = (await each.ask("GET", "/metrics")).body.decode()
        assert re.search(
            r'gateway_requests_total\{code="200",endpoint="/generate"\} [1-9]', counted
        )


async def test_requests_of_one_session_go_to_one_gateway(balanced: Gateway) -> None:
    first = await answers(balanced, "x-session-id")
    again = await answers(balanced, "x-session-id")
    # A request is named after the client of the bus that its gateway is.
    assert [rid.partition("/")[0] for rid in first] == [rid.partition("/")[0] for rid in again]
    assert len({rid.partition("/")[0] for rid in first}) == 2


async def test_a_gateway_that_ends_is_passed_over(
    gateways: list[Gateway], balanced: Gateway
) -> None:
    assert await gateways[0].end() == STOPPED_BY_CTRL_C
    assert len(await answers(balanced, "x-request-id")) == N_IDS
