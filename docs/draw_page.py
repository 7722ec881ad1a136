"""Draws the pictures of a gateway's page in docs/gateway.md: `make pictures`.

A fleet of two samples and is updated; one worker is paused, one is killed. The run is real, so
the pictures differ a little each time: look at them before committing them.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from random import Random

import torch
import uvloop
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright
from speaking_model import save_speaking_model
from transformers import LlamaForCausalLM

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
N_CALLERS = 6
SLOTS = 6
N_COLOURS = 200
WIDE, NARROW = (1280, 1160), (390, 844)
TRAIN_S = 7.0
SETTLED_S = 3.0
DEADLINE_S = 60.0
TEXTS = ("README.md", "docs/weights.md", "docs/streams.md", "docs/watching.md", "docs/security.md")


async def sample(client: RolloutClient, number: int, beginnings: list[int]) -> None:
    """Sample one stream after the other."""
    rng = Random(number)  # noqa: S311 - it is to be the same again
    async with client.session(f"writer-{number}", wait_s=DEADLINE_S):
        while True:
            sampling = SamplingParams(
                max_new_tokens=rng.randrange(300, 1500), temperature=1.0, ignore_eos=True
            )
            prompt = [rng.choice(beginnings)]
            stream = client.stream(
                prompt, sampling, session=f"writer-{number}", deadline_s=DEADLINE_S * 5
            )
            async for _ in stream:
                pass


async def train(client: RolloutClient, path: Path) -> None:
    """Publish versions, of which only the traces matter."""
    model = LlamaForCausalLM.from_pretrained(path, local_files_only=True)
    publisher = rolloutbus.WeightPublisher(client)
    while True:
        await asyncio.sleep(TRAIN_S)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.98)
        await publisher.publish(model.named_parameters(), in_flight="keep", deadline_s=DEADLINE_S)


async def open_page(browser: Browser, url: str, scheme: str, size: tuple[int, int]) -> Page:
    """A tab of its own."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = await context.new_page()
    await page.goto(url)
    return page


async def draw(page: Page, name: str) -> None:
    """What it shows now, in few colours: a picture of a page needs no more."""
    whole = Image.open(BytesIO(await page.screenshot()))
    few = whole.quantize(N_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(PICTURES / name, optimize=True)


async def main() -> None:
    """Draw all of them."""
    PICTURES.mkdir(exist_ok=True)
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        path.mkdir()
        text = "\n".join((DOCS.parent / name).read_text(encoding="utf-8") for name in TEXTS)
        beginnings = save_speaking_model(path, text)
        options = {"threads": 1, "slots": SLOTS}
        async with (
            rolloutbus.up(model=path, workers=2, engine_options=options, http=0) as fleet,
            rolloutbus.connect(fleet.address, name="writer") as client,
            async_playwright() as playwright,
        ):
            browser = await playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox"]
            )
            light = await open_page(browser, fleet.http, "light", WIDE)
            dark = await open_page(browser, fleet.http, "dark", WIDE)
            narrow = await open_page(browser, fleet.http, "dark", NARROW)
            tasks = [asyncio.create_task(sample(client, n, beginnings)) for n in range(N_CALLERS)]
            tasks.append(asyncio.create_task(train(client, path)))
            await asyncio.sleep(3 * TRAIN_S)
            await client.pause("in_place", target="w1")
            await asyncio.sleep(SETTLED_S)
            await draw(light, "page.png")
            await client.resume(target="w1")
            await asyncio.sleep(TRAIN_S)
            fleet.kill("w0")
            lost = dark.locator("#log li.fault", has_text="w0").first
            await lost.wait_for(timeout=DEADLINE_S * 1000)
            await draw(dark, "page_dark.png")
            await draw(narrow, "page_narrow.png")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await browser.close()
    sys.stdout.write(f"{', '.join(sorted(each.name for each in PICTURES.glob('page*')))}\n")


if __name__ == "__main__":
    uvloop.run(main())
