"""The live page of a gateway, in a browser: it shows what happens, and does what keys say."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from playwright.async_api import Browser
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import rolloutbus
from rolloutbus import Fleet, SamplingParams, WeightPublisher
from rolloutbus.engine_worker.engines.fake.engine import FAKE_VOCAB_SIZE
from rolloutbus.launcher.settings import UpOptions
from tests.integration.browser import WatchedPage, chromium
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, Streamed
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake", "engine_options": {"slots": 8, "step_s": 0.02}}
HOSTILE = "<img/src=x/onerror=alert(1)>"
"""The name of a client, and so part of its request ids."""
PHONE = (390, 844)
N_OF_VERSION = 50
"""Tokens: fewer than the page keeps."""
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}


@pytest.fixture(scope="module")
def hostile_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each token is an element that would do something."""
    path = tmp_path_factory.mktemp("tokenizer")
    texts = {f"<img/src=x/onerror=alert({n})>": n for n in range(FAKE_VOCAB_SIZE)}
    core = Tokenizer(models.WordLevel(texts, unk_token=next(iter(texts))))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)  # pyright: ignore[reportUnknownMemberType] - as transformers' stubs are
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, hostile_tokenizer: Path) -> AsyncIterator[Gateway]:
    async with gateway(
        "--address", fleet.address, "--tokenizer", str(hostile_tokenizer)
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(browser: Browser, served: Gateway) -> AsyncIterator[WatchedPage]:
    page = await WatchedPage.opened(browser, served.url)
    yield page
    assert page.faults == []
    assert all(url.startswith((served.url, "data:")) for url in page.asked), "it works offline"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stream(fleet: Fleet, watched: WatchedPage) -> AsyncIterator[Streamed]:
    """One that goes on, of the client with the hostile name; the page was open before."""
    await watched.has("#link", "live")
    async with rolloutbus.connect(fleet.address, name=HOSTILE) as client:
        sampling = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True, sampling_seed=1)
        running = Streamed(client, [1, 2, 3], sampling, deadline_s=8 * DEADLINE_S)
        yield running
        await running.cut()


async def test_workers_and_tokens_are_shown_as_they_come(
    watched: WatchedPage, stream: Streamed
) -> None:
    await watched.has("#workers td", "w0")
    await watched.has("#workers td", "w1")
    await watched.becomes("document.querySelectorAll('.tokens span').length > 5")
    # Of a long stream the page keeps the last tokens only; its count goes on.
    count = "parseInt(document.querySelector('article .faint').textContent)"
    n_before = await watched.evaluate(count)
    await watched.becomes(f"{count} > {n_before}")
    await watched.becomes("parseInt(document.querySelector('#totals dd').textContent) > 0")
    assert stream.tokens
    shade = "getComputedStyle(document.querySelector('.tokens span')).getPropertyValue('--s')"
    assert float(str(await watched.evaluate(shade))) > 0, "shaded by its logprob"


async def test_names_and_texts_are_never_html(watched: WatchedPage, stream: Streamed) -> None:
    await watched.has("article b", HOSTILE[:10])
    await watched.has(".tokens span", "<img/src=x/onerror=alert(")
    title = await watched.evaluate("document.querySelector('article b').title")
    assert title == stream.rid
    assert await watched.evaluate("document.querySelectorAll('img').length") == 0


async def test_a_version_that_moves_is_shown_on_worker_and_token(
    fleet: Fleet, watched: WatchedPage, stream: Streamed, token_limit: TokenLimit
) -> None:
    # Held after a few tokens of the new version, which would soon be gone from the page.
    with token_limit.at(1):
        assert await stream.stands_still()
        async with rolloutbus.connect(fleet.address) as client:
            published = await WeightPublisher(client).publish(
                WEIGHTS, require="all", in_flight="keep", deadline_s=DEADLINE_S
            )
        token_limit.move(len(stream.tokens) + N_OF_VERSION)
        version = f"v{published.version}"
        await watched.has("#workers .version", version)
        await watched.has("#updates li", f"{version} committed")
        await watched.has(".tokens .version", version)


async def test_light_dark_and_the_switch_between_them(watched: WatchedPage) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    colours: list[object] = []
    for scheme in ("light", "dark"):
        await watched.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        colours.append(await watched.evaluate(paper))
    assert colours == ["rgb(244, 245, 247)", "rgb(15, 18, 22)"]
    await watched.page.click("#theme")
    assert await watched.evaluate(paper) == colours[0], "light although the system is dark"
    await watched.page.keyboard.press("t")
    await watched.page.keyboard.press("t")
    assert await watched.evaluate("document.documentElement.dataset.theme ?? 'auto'") == "auto"


async def test_it_can_be_used_with_keys_alone(watched: WatchedPage) -> None:
    page = watched.page
    await page.keyboard.press("?")
    await watched.becomes("document.querySelector('#about').open")
    await watched.has("#about kbd", "/")
    await page.keyboard.press("Escape")
    await watched.becomes("!document.querySelector('#about').open")
    await page.keyboard.press("3")
    assert await watched.evaluate("document.activeElement.id") == "streams"
    outline = await watched.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus can be seen"
    await page.keyboard.press("/")
    await page.keyboard.type("nobody")
    await page.keyboard.press("Enter")
    await watched.becomes("!document.querySelector('article')")
    await page.keyboard.press("Escape")
    await page.fill("#match", "")
    await page.press("#match", "Enter")
    await watched.has("article b", HOSTILE[:10])
    await page.keyboard.press("Escape")


async def test_a_page_that_is_paused_stands_still_and_goes_on(watched: WatchedPage) -> None:
    await watched.page.click("#freeze")
    assert await watched.evaluate("document.querySelector('#freeze').ariaPressed") == "true"
    await watched.evaluate("document.querySelector('article').id = 'before'")
    await watched.page.click("#freeze")
    await watched.becomes("!document.querySelector('#before')")  # the page begins anew
    await watched.becomes("document.querySelectorAll('.tokens span').length > 5")


async def test_it_fits_a_narrow_screen(watched: WatchedPage) -> None:
    width, height = PHONE
    await watched.page.set_viewport_size({"width": width, "height": height})
    assert await watched.evaluate("document.documentElement.scrollWidth") == width
    await watched.becomes("document.querySelector('canvas').clientWidth < 390")
    await watched.page.set_viewport_size({"width": 1280, "height": 900})


async def test_a_worker_that_is_killed_is_shown(
    fleet: Fleet, watched: WatchedPage, stream: Streamed
) -> None:
    victim = stream.worker
    await watched.has("article .chip", victim)  # "again" is said of what was seen before
    fleet.kill(victim)
    await watched.has("#log li.fault", victim)
    await watched.has("article .warn", "again")


async def test_the_policy_of_the_page_lets_nothing_in(served: Gateway) -> None:
    for path in ("/", "/page/main.js", "/page/page.css", "/page/lanes.js"):
        reply = await served.ask("GET", path)
        assert reply.status == 200, path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("/page/nothing.js", "/page/..%2Fapi.py", "/page/__init__.py"):
        assert (await served.ask("GET", path)).status == 404, path


async def test_a_parameter_that_is_not_known_is_refused(served: Gateway) -> None:
    reply = await served.ask("GET", "/live?macth=w0")
    assert (reply.status, reply.json["error"]["param"]) == (400, "macth")


async def test_a_gateway_that_ends_lets_its_pages_go_at_once(fleet: Fleet) -> None:
    async with gateway("--address", fleet.address) as running:
        reader, writer = await running.open("GET", "/live", b"")
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b'"kind":"frame"')
            ending = asyncio.create_task(running.end())
            rest = await reader.read()
            assert await ending == 130
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
