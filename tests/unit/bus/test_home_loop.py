"""An object belongs to the loop that it was opened on, until it is closed."""

import asyncio

import pytest

from rolloutbus.bus.actor.loop import HomeLoop
from rolloutbus.bus.wire.errors import WrongEventLoop


async def _settle(home: HomeLoop) -> None:
    home.settle()


async def _require(home: HomeLoop) -> None:
    home.require()


def test_any_loop_will_do_before_it_is_opened_and_after_it_is_closed() -> None:
    home = HomeLoop("client")
    home.require()
    asyncio.run(_require(home))
    asyncio.run(_settle(home))
    home.leave()
    asyncio.run(_require(home))


def test_loop_that_has_ended_is_said_to_be_closed() -> None:
    home = HomeLoop("client")
    asyncio.run(_settle(home))
    with pytest.raises(WrongEventLoop, match=r"client was called from another .* is closed; make"):
        asyncio.run(_require(home))
    with pytest.raises(WrongEventLoop, match="outside of any event loop"):
        home.require()


def test_it_is_not_opened_again_while_it_is_open_elsewhere() -> None:
    home = HomeLoop("client")
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_settle(home))
        with pytest.raises(WrongEventLoop, match="run_coroutine_threadsafe"):
            asyncio.run(_settle(home))
        loop.run_until_complete(_settle(home))
    finally:
        loop.close()
