"""Each curl line of docs/gateway.md does what it says."""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from rolloutbus import Fleet
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, Json, gateway
from tests.integration.live_fleet import DEADLINE_S, STEADY_HOST
from tests.integration.reciting_model import LINES, save_reciting_model
from tests.integration.trainer_group import rank_0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 8},
    "host": STEADY_HOST,
}
PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
CURLS = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
"""In the page's order: a pause is followed by its end."""
REFUSED = {
    "/v1/embeddings": "is_embedding",
    "/add_worker": "by itself",
    "/load_lora_adapter": "weights_root",
    "/unload_lora_adapter": "math",
}
"""Paths that this fleet cannot serve, whose workers read no files -> a word of the reason."""
JOINS = ("/init_weights_update_group", "/init_weight_transfer_engine")
BUCKETS = ("/update_weights_from_distributed", "/update_weights")
OVER_A_GROUP = (*JOINS, *BUCKETS, "_weights_update_group", "_weight_update")
"""Ends of paths that need a trainer beside them."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Called as the page calls it."""
    path = tmp_path_factory.mktemp("gateway_page") / "model"
    path.mkdir()
    save_reciting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, tiny_model: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(tiny_model)]
    async with gateway(*arguments, "--weights-root", str(tiny_model.parent)) as running:
        yield running


def asked_by(curl: str, directory: Path) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers of a line that is typed in this directory."""
    words = shlex.split(curl, comments=True)
    body = words[words.index("-d") + 1].encode() if "-d" in words else b""
    if "--data-binary" in words:
        body = (directory / words[words.index("--data-binary") + 1].lstrip("@")).read_bytes()
    said = [words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H"]
    [url] = [word for word in words if word.startswith("http")]
    method = "POST" if body or "-X" in words else "GET"
    return method, url.removeprefix("http://127.0.0.1:8000"), body, dict(said)


async def begins_and_goes_on(served: Gateway, path: str) -> None:
    """Events without end: the first two come."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await served.open("GET", path, b"")
        for kind in (b"hello", b"frame"):
            await reader.readuntil(b'"kind":"%b"' % kind)
        writer.close()


async def test_every_line_is_answered(served: Gateway, tiny_model: Path) -> None:
    assert CURLS, "the page has none"
    for curl in CURLS:
        method, path, body, headers = asked_by(curl, tiny_model.parent)
        if path.endswith(OVER_A_GROUP):
            continue
        if "-N" in curl:
            await begins_and_goes_on(served, path)
            continue
        reply = await served.ask(method, path, body, headers)
        reason = REFUSED.get(path.partition("?")[0])
        if reason is not None:
            assert reply.status == HTTPStatus.BAD_REQUEST, (curl, reply.body)
            assert reason in reply.json["error"]["message"]
            continue
        assert reply.status == HTTPStatus.OK, (curl, reply.body)
        if b"please hello" in body and b"stream" not in body:
            assert LINES["hello"] in reply.body.decode(), curl
        if b'"stream": true' in body:
            assert reply.events, curl
        elif reply.headers["content-type"] == "application/json":
            assert json.loads(reply.body), curl


async def test_lines_of_a_trainers_group_bring_its_weights(
    served: Gateway, tiny_model: Path
) -> None:
    file = tiny_model / "model.safetensors"
    tensors = load_file(file)
    published: list[int] = []
    async with AsyncExitStack() as trainers:
        trainer = await trainers.enter_async_context(rank_0())
        for curl in CURLS:
            method, path, body, _ = asked_by(curl, tiny_model.parent)
            if not path.endswith(OVER_A_GROUP):
                continue
            if path == JOINS[1]:  # SkyRL's: another trainer
                trainer = await trainers.enter_async_context(rank_0())
            if path in BUCKETS:
                body = with_tensors(body, trainer.bucket(tensors))
                trainer.order(file, [*tensors], packed=b"packed" in body)
            body = body.replace(b"29500", str(trainer.port).encode())
            reply = await served.ask(method, path, body)
            assert reply.status == HTTPStatus.OK, (curl, reply.body)
            if path in (*JOINS, *BUCKETS):
                assert not (await trainer.said()).get("problem")
            if reply.json.get("version"):
                published.append(reply.json["version"])
    first, second = published
    assert second == first + 1


def with_tensors(body: bytes, bucket: Json) -> bytes:
    """The body of a bucket, of other tensors than the page's."""
    said = json.loads(body)
    part = said.get("update_info", said)
    part["names"], part["shapes"] = bucket["names"], bucket["shapes"]
    part["dtype_names" if "dtype_names" in part else "dtypes"] = bucket["dtypes"]
    return json.dumps(said).encode()
