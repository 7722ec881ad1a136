"""API keys of a gateway: each acts as one principal of the bus, with its rights."""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import safetensors.torch
import torch

import rolloutbus
from rolloutbus import Fleet
from rolloutbus.bus.security.principals import Role
from rolloutbus.errors import SettingsError
from rolloutbus.gateway.keys.http_keys import add_http_key, read_http_keys
from tests.integration.browser import WatchedPage, chromium
from tests.integration.gateway_process import Gateway, Json, gateway
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, PATIENT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

GENERATE: Json = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
STREAMED = GENERATE | {"stream": True}
N_FRAMES = 4
"""Told by a page while streams are sampled that it may not show."""

UPDATE: Json = {
    "safetensors": base64.b64encode(safetensors.torch.save({"a": torch.ones(1)})).decode(),
    "timeout": 5,
}
INVITATION: Json = {
    "master_address": "nobody.invalid",
    "master_port": 9,
    "rank_offset": 1,
    "world_size": 2,
}
"""To a place that is looked up for a trainer only, and not found."""


@dataclass(frozen=True)
class Guarded:
    """A gateway in front of a fleet with keys."""

    gateway: Gateway
    keys: KeyDirectory
    secrets: Mapping[str, str]
    """Name -> API key."""

    async def status(self, path: str, name: str, body: Json | None = None) -> int:
        headers = {"Authorization": f"Bearer {self.secrets[name]}"}
        method = "GET" if body is None else "POST"
        return (await self.gateway.ask(method, path, body or b"", headers=headers)).status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("keys")
    async with rolloutbus.up(
        workers=1, engine="fake", store=False, secure=directory, lease=PATIENT
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    keys = KeyDirectory(Path(fleet.key_file).parent)
    file = tmp_path_factory.mktemp("http") / "http-keys.json"
    roles: dict[str, Role] = {
        "leaver": "client",  # the first, which answers for health while it may
        "user": "client",
        "watcher": "subscriber",
        "coach": "trainer",
        "climber": "client",
    }
    for name, role in roles.items():
        keys.add(name, role)
    secrets = {name: add_http_key(file, name, keys.file(name)) for name in roles}
    async with gateway("--address", fleet.address, "--http-keys", str(file)) as running:
        yield Guarded(running, keys, secrets)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": "Bearer"},
    ],
)
async def test_without_a_known_key_nothing_is_answered(
    guarded: Guarded, headers: dict[str, str]
) -> None:
    for path in ("/generate", "/v1/models", "/metrics", "/v1/rl/workers", "/nowhere"):
        reply = await guarded.gateway.ask("GET", path, headers=headers)
        assert reply.status == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json["error"]["type"] == "authentication_error"


async def test_a_balancer_may_ask_for_health(guarded: Guarded) -> None:
    async with asyncio.timeout(DEADLINE_S):  # a young router sends nobody anything for a second
        while (reply := await guarded.gateway.ask("GET", "/health")).status != 200:
            assert reply.status == 503


@pytest.mark.parametrize(
    ("name", "path", "body", "status"),
    [
        ("user", "/generate", GENERATE, 200),
        ("user", "/server_info", None, 200),
        ("user", "/pause_generation", {"mode": "in_place"}, 403),
        ("watcher", "/generate", GENERATE, 403),
        ("user", "/update_weights_from_tensor", UPDATE, 403),
        ("user", "/init_weights_update_group", INVITATION, 403),
        ("coach", "/init_weights_update_group", INVITATION, 400),
        ("watcher", "/list_workers", None, 200),
        ("coach", "/flush_cache", {}, 200),
    ],
)
async def test_a_key_may_do_what_its_principal_may(
    guarded: Guarded, name: str, path: str, body: Json | None, status: int
) -> None:
    assert await guarded.status(path, name, body) == status


async def test_the_page_is_open_to_all_and_what_it_shows_is_not(guarded: Guarded) -> None:
    for path in ("/", "/page/main.js", "/page/page.css"):
        reply = await guarded.gateway.ask("GET", path)
        assert (reply.status, b"w0" in reply.body) == (200, False), path
    for path in ("/live", "/page", "/page/../live", "//", "/live/"):
        assert (await guarded.gateway.ask("GET", path)).status in {401, 404}, path


def is_enough(said: bytes, *, is_shown: bool) -> bool:
    """Whether a worker and a stream are shown, or the stream would have been."""
    if is_shown:
        return b'"name":"w0"' in said and b'"kind":"tokens"' in said
    return said.count(b'"kind":"frame"') >= N_FRAMES


async def streams_on_page(guarded: Guarded, page: str, sampler: str, *, is_shown: bool) -> str:
    """What the page of one principal is told while another one samples, until it is enough."""
    headers = {"Authorization": f"Bearer {guarded.secrets[page]}"}
    reader, writer = await guarded.gateway.open("GET", "/live", b"", headers=headers)
    said = b""
    async with asyncio.timeout(DEADLINE_S):
        while not is_enough(said, is_shown=is_shown):
            assert await guarded.status("/generate", sampler, STREAMED) == 200
            said += await reader.read(1 << 16)
    writer.close()
    return said.decode()


@pytest.mark.parametrize(
    ("page", "sampler", "is_shown"),
    [("user", "user", True), ("watcher", "user", True), ("user", "coach", False)],
)
async def test_a_page_shows_the_streams_that_its_principal_may_see(
    guarded: Guarded, page: str, sampler: str, is_shown: bool
) -> None:
    said = await streams_on_page(guarded, page, sampler, is_shown=is_shown)
    assert ('"kind":"tokens"' in said) == is_shown
    assert '"name":"w0"' in said


async def test_a_page_asks_for_a_key_and_keeps_it_in_its_tab(guarded: Guarded) -> None:
    async with chromium() as browser:
        watched = await WatchedPage.opened(browser, guarded.gateway.url)
        for key, told in (("rb-wrong", "not known"), (guarded.secrets["user"], "")):
            await watched.becomes("document.querySelector('#ask').open")
            await watched.page.fill("#key", key)
            await watched.page.press("#key", "Enter")
            if told:
                await watched.has("#why", told)
        await watched.has("#link", "live")
        await watched.has("#workers td", "w0")
        await watched.page.reload()
        await watched.has("#link", "live")
        assert await watched.evaluate("document.cookie + JSON.stringify(localStorage)") == (
            '{"theme":"auto"}'
        )
        assert guarded.secrets["user"] not in "".join(watched.asked), "keys are in no address"
        assert watched.faults == []


async def test_the_key_of_a_revoked_principal_is_as_good_as_unknown_and_others_go_on(
    guarded: Guarded,
) -> None:
    assert await guarded.status("/generate", "leaver", GENERATE) == 200
    guarded.keys.revoke("leaver")
    body = GENERATE | {"timeout": 1.0}
    async with asyncio.timeout(DEADLINE_S):
        # What is under way when its client is dismissed, or still asks, has no answer.
        while (status := await guarded.status("/generate", "leaver", body)) in {200, 503, 504}:
            pass
    assert status == 401
    headers = {"Authorization": f"Bearer {guarded.secrets['leaver']}"}
    reply = await guarded.gateway.ask("POST", "/generate", GENERATE, headers=headers)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert "no rights in the fleet any more" in reply.json["error"]["message"]
    assert (await guarded.gateway.ask("GET", "/health")).status == 200
    assert await guarded.status("/generate", "user", GENERATE) == 200


async def test_a_principal_that_gets_other_rights_goes_on_with_these(guarded: Guarded) -> None:
    assert await guarded.status("/generate", "climber", GENERATE) == 200
    assert await guarded.status("/pause_generation", "climber", {"mode": "in_place"}) == 403
    guarded.keys.change_role("climber", "trainer")
    async with asyncio.timeout(DEADLINE_S):
        while await guarded.status("/pause_generation", "climber", {"mode": "in_place"}) != 200:
            assert await guarded.status("/generate", "climber", GENERATE) in {200, 503}
    assert await guarded.status("/continue_generation", "climber", {}) == 200
    assert await guarded.status("/generate", "climber", GENERATE) == 200


async def test_the_file_holds_no_key_and_one_key_for_each_name(tmp_path: Path) -> None:
    file = tmp_path / "http-keys.json"
    first = add_http_key(file, "a", None)
    second = add_http_key(file, "a", None)
    assert first != second
    assert [each.name for each in read_http_keys(file)] == ["a"]
    assert first not in file.read_text()
    assert second not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '[{"name": "a"}]', '[{"name": "a", "sha256": "x", "key_file": ""}]'],
)
async def test_a_file_that_is_none_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "http-keys.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"http-keys\.json"):
        read_http_keys(file)
