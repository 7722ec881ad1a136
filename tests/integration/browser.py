"""Debian's Chromium without a screen, and pages in it that may not fail in silence."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.integration.live_fleet import DEADLINE_S

WIDE = (1280, 900)


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """One browser; the test is skipped where there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: apt install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


class WatchedPage:
    """A tab of its own; what it asks for and what goes wrong in it is noted."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.faults: list[str] = []
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"it was made to say {dialog.message}"))
        page.on("console", lambda said: self._said(said.type, said.text))

    @classmethod
    async def opened(
        cls, browser: Browser, url: str, size: tuple[int, int] = WIDE
    ) -> "WatchedPage":
        """At this address."""
        width, height = size
        context = await browser.new_context(viewport={"width": width, "height": height})
        watched = cls(await context.new_page())
        await watched.page.goto(url)
        return watched

    def _said(self, kind: str, text: str) -> None:
        # A response of 401 is what a page without a key gets.
        if kind == "error" and "401" not in text:
            self.faults.append(text)

    async def has(self, selector: str, text: str = "") -> None:
        """Wait until there is such an element with this text."""
        await self.page.locator(selector, has_text=text).first.wait_for(state="attached")

    async def evaluate(self, script: str) -> object:
        """The value of an expression."""
        return await self.page.evaluate(script)

    async def becomes(self, expression: str) -> None:
        """Wait until an expression is true, judged before each time that the page is drawn."""
        # Playwright's own wait evaluates texts in the page, which the page's policy forbids.
        look = f"const look = () => ({expression}) ? done() : requestAnimationFrame(look); look();"
        async with asyncio.timeout(DEADLINE_S):
            await self.page.evaluate(f"new Promise(done => {{ {look} }})")
