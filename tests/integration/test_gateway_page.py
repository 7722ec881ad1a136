"""Each curl line of docs/gateway.md does what it says."""

import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import Fleet
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.reciting_model import LINES, save_reciting_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine_options": {"threads": 1, "slots": 8}, "store": False}
PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
CURLS = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
"""In the page's order: a pause is followed by its end."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Called as the page calls it."""
    path = tmp_path_factory.mktemp("gateway_page") / "model"
    path.mkdir()
    save_reciting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path) -> AsyncIterator[Gateway]:
    async with gateway("--address", fleet.address, "--tokenizer", str(tiny_model)) as running:
        yield running


def asked_by(curl: str) -> tuple[str, str, bytes]:
    """Method, path and body of a line."""
    words = shlex.split(curl)
    body = words[words.index("-d") + 1] if "-d" in words else ""
    [url] = [word for word in words if word.startswith("http")]
    method = "POST" if body or "-X" in words else "GET"
    return method, url.removeprefix("http://127.0.0.1:8000"), body.encode()


async def test_every_line_is_answered(served: Gateway) -> None:
    assert CURLS, "the page has none"
    for curl in CURLS:
        method, path, body = asked_by(curl)
        reply = await served.ask(method, path, body)
        assert reply.status == 200, (curl, reply.body)
        if b"please hello" in body and b"stream" not in body:
            assert LINES["hello"] in reply.body.decode(), curl
        if b'"stream": true' in body:
            assert reply.events, curl
        elif reply.headers["content-type"] == "application/json":
            assert json.loads(reply.body), curl
