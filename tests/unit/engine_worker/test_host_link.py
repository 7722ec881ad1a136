"""Two ends of a socket pair carry batches, whole and in order, until either closes."""

import asyncio
import socket

import msgspec

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.engine_worker.host.link import CUT_BYTES, HostLink

DEADLINE_S = 60.0


class End:
    """One end and what came out of it."""

    def __init__(self) -> None:
        self.batches: list[list[Entry]] = []
        self.news = asyncio.Event()

    def take(self, entries: list[Entry]) -> None:
        self.batches.append(entries)
        self.news.set()

    @property
    def rids(self) -> list[str]:
        return [entry.rid for batch in self.batches for entry in batch]

    async def until_has(self, n_entries: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.rids) < n_entries:
                self.news.clear()
                await self.news.wait()


async def pair() -> tuple[HostLink, HostLink, End]:
    left, right = socket.socketpair()
    end = End()
    return await HostLink.open(left, end.take), await HostLink.open(right, end.take), end


async def test_entries_of_one_tick_arrive_as_one_batch() -> None:
    left, right, end = await pair()
    for n in range(100):
        left.send(Entry("engine_beat", f"c/{n}"))
    await end.until_has(100)
    assert len(end.batches) == 1
    assert end.rids == [f"c/{n}" for n in range(100)]
    left.close()
    right.close()
    await right.closed()


async def test_frames_larger_than_a_read_arrive_whole() -> None:
    left, right, end = await pair()
    body = msgspec.Raw(msgspec.msgpack.encode(bytes(3_000_000)))
    for n in range(3):
        left.send(Entry("deltas", f"c/{n}", body=body))
        left.flush()
    await end.until_has(3)
    assert all(entry.body == body for batch in end.batches for entry in batch)
    left.close()
    right.close()


async def test_more_than_one_frame_may_hold_arrives_in_order() -> None:
    left, right, end = await pair()
    body = msgspec.Raw(msgspec.msgpack.encode(bytes(CUT_BYTES // 3)))
    for n in range(5):
        left.send(Entry("extras", f"c/{n}", body=body))
    left.send(Entry("deltas", "c/5"))
    await end.until_has(6)
    assert end.rids == [f"c/{n}" for n in range(6)]
    assert len(end.batches) > 1
    left.close()
    right.close()


async def test_what_was_said_before_the_end_is_delivered_before_it() -> None:
    left, right, end = await pair()
    left.send(Entry("engine_failed", "last"))
    left.close()
    async with asyncio.timeout(DEADLINE_S):
        await right.closed()
    assert end.rids == ["last"]
    right.send(Entry("generate"))  # nobody is there: no error, no message
    right.close()
