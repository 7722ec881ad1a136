"""A mailbox keeps order and its limit, and nobody waits at one that has ended."""

import asyncio

import pytest

from rolloutbus.bus.actor.mailbox import Mailbox, MailboxStatistics
from rolloutbus.bus.wire.errors import ActorStopped, MailboxFull

DEADLINE_S = 60.0


def _filled(*items: int, limit: int = 3) -> Mailbox[int]:
    mailbox = Mailbox[int](limit)
    for item in items:
        mailbox.put(item)
    return mailbox


@pytest.mark.parametrize("limit", [0, -1])
def test_a_mailbox_without_room_cannot_be_made(limit: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Mailbox[int](limit)


async def test_items_come_out_in_the_order_they_went_in() -> None:
    mailbox = _filled(1, 2, 3)
    assert [await mailbox.get() for _ in range(3)] == [1, 2, 3]


def test_a_full_mailbox_says_so_and_keeps_what_it_has() -> None:
    mailbox = _filled(1, 2, limit=2)
    with pytest.raises(MailboxFull) as caught:
        mailbox.put(3)
    assert caught.value.outcome == "not_started"
    assert mailbox.close() == [1, 2]


async def test_a_waiting_getter_gets_what_is_put_later() -> None:
    mailbox = Mailbox[int](1)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.get())
        await asyncio.sleep(0)  # lets it begin to wait
        mailbox.put(7)
    assert waiting.result() == 7


async def test_no_item_is_lost_to_a_getter_that_was_cancelled() -> None:
    mailbox = Mailbox[int](1)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        cancelled, patient = tasks.create_task(mailbox.get()), tasks.create_task(mailbox.get())
        await asyncio.sleep(0)  # lets both begin to wait
        mailbox.put(7)
        cancelled.cancel()
    assert patient.result() == 7


async def test_after_its_end_readers_get_the_rest_and_then_stop() -> None:
    mailbox = _filled(1, 2)
    mailbox.end()
    assert [item async for item in mailbox] == [1, 2]
    with pytest.raises(ActorStopped):
        mailbox.put(3)


async def test_closing_returns_what_was_left_and_ends_all_who_wait() -> None:
    mailbox = Mailbox[int](2)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(_ended(mailbox)) for _ in range(2)]
        await asyncio.sleep(0)  # lets both begin to wait
        assert mailbox.close() == []
    assert all(task.result() for task in waiting)
    assert _filled(1, 2).close() == [1, 2]


async def _ended(mailbox: Mailbox[int]) -> bool:
    try:
        await mailbox.get()
    except ActorStopped:
        return True
    return False


async def test_its_gauge_remembers_the_most_that_waited() -> None:
    mailbox = _filled(1, 2)
    await mailbox.get()
    mailbox.put(3)
    await mailbox.get()
    assert mailbox.statistics() == MailboxStatistics(size=1, limit=3, peak=2, total=3)
