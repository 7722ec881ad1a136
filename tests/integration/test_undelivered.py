"""What the middle of a star could not send, for its peer is gone, it takes back."""

import asyncio
from pathlib import Path

import pytest

from rolloutbus.bus.transport.zmq_ports import DealerPort, RouterPort
from rolloutbus.bus.wire.entry import Entry, Peer
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


async def test_entries_for_a_connection_that_is_gone_come_back(tmp_path: Path) -> None:
    said: asyncio.Queue[Peer] = asyncio.Queue()
    returned: list[tuple[Peer, list[Entry]]] = []
    endpoint = f"ipc://{tmp_path}/r"
    port = RouterPort(
        [endpoint],
        lambda peer, _: said.put_nowait(peer),
        on_undelivered=lambda peer, entries: returned.append((peer, entries)),
    )
    link = DealerPort(endpoint, lambda _: None)
    try:
        link.send(Entry("hello"))
        async with asyncio.timeout(DEADLINE_S):
            peer = await said.get()
            port.send(peer, Entry("welcome"))
            await asyncio.sleep(0)  # the end of the loop's turn: it is sent
            assert returned == []
            link.close()
            n_sent = 0
            while not returned:  # until libzmq has noticed
                n_sent += 1
                port.send(peer, Entry("lease", str(n_sent)))
                await asyncio.sleep(0)  # as above
        assert returned[0][0] == peer
        assert [entry.kind for entry in returned[0][1]] == ["lease"]
    finally:
        link.close()
        port.close()
