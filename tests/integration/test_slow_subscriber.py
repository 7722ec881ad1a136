"""Who reads too slowly slows nobody down, knows it, and catches up.

Nothing here waits for a number of seconds: a reader sleeps until too much waits for it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient
from rolloutbus.bus.transport.zmq_topics import MAX_UNREAD
from rolloutbus.events import Demoted, Restored, Tokens
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.event_reader import EventReader
from tests.integration.live_fleet import (
    DEADLINE_S,
    PACE_S,
    START_S,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
)
from tests.integration.scripted_fleet import scripted_fleet, tokens_of
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake", "store": False}
N_TOKENS = 100
N_CLIENTS = 60
"""A worker publishes a message for each of them after every step."""
N_STEPS = 50
KIB = 1 << 10
MORE_THAN_SOCKETS_HOLD = 2 * MAX_UNREAD + 5_000
"""Messages: of both ends of a connection, and what the system has room for between them."""


def named(fleet: Fleet, name: str) -> ClientSettings:
    return ClientSettings(name=name, router=fleet.address, overtime_s=DEADLINE_S)


async def burst(*clients: RolloutClient) -> list[Rollout]:
    """Rollouts side by side, all of which end as they must."""
    streams = [Streamed(client, [7], fake_sampling(N_TOKENS)) for client in clients]
    rollouts = [await streamed.rollout() for streamed in streams]
    for rollout in rollouts:
        assert_fake_rollout([7], rollout, N_TOKENS)
    return rollouts


async def test_a_reader_that_sleeps_is_told_results_and_then_tokens_again(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    small = SubscriberSettings(waiting_bytes=64 * KIB, unread_messages=sys.maxsize)
    slow = EventReader(Subscriber(named(fleet, "slow"), settings=small))
    async with EventReader(rolloutbus.subscribe(fleet.address)) as quick, slow:
        for each in (quick, slow):
            await each.hears(client, n_workers=2)
        slow.pause()
        rollouts: list[Rollout] = []
        with token_limit.at(N_TOKENS):
            under_way = Streamed(client, [9], fake_sampling(2 * N_TOKENS), deadline_s=START_S)
            async with asyncio.timeout(START_S):
                while slow.subscriber.is_live:
                    rollouts += await burst(client)
            rollouts += await burst(client, client)
            for rollout in rollouts:
                await quick.whole(rollout)

            slow.go_on()
            await slow.until(lambda: bool(slow.of(Restored)))
            assert slow.of(Demoted)[0].cause == "reader"
            for rollout in rollouts:
                await slow.whole(rollout)
            await under_way.reached(N_TOKENS)
            await slow.until(lambda: slow.tokens(under_way.rid) == under_way.tokens)
        rest = await under_way.rollout()
        await slow.whole(rest)
        assert slow.tokens(rest.rid) == rest.tokens.tolist()
        assert slow.subscriber.counters.tokens_lost == 0


class Tail:
    """`rolloutbus tail --json`: it waits for who reads its lines, and reads no socket meanwhile."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._left = b""
        self.events: list[dict[str, Any]] = []
        self.ends: dict[str, dict[str, Any]] = {}
        """rid -> how the stream ended."""
        self.held: dict[str, list[int]] = {}
        """rid -> its tokens as they were told."""

    async def read(self) -> None:
        """Read one line."""
        while b"\n" not in self._left:
            more = await self._lines.read(64 * KIB)
            assert more, "the tail ended"
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        event = json.loads(line)
        self.events.append(event)
        if event["event"] == "finished":
            self.ends[event["rid"]] = event
        elif event["event"] == "tokens":
            held = self.held.setdefault(event["rid"], [])
            held[event["start"] :] = event["tokens"]

    async def read_until(self, is_so: Callable[[], bool]) -> None:
        """Read until it is so, judged after each line."""
        async with asyncio.timeout(START_S):
            while not is_so():
                await self.read()

    def has(self, running: Mapping[str, int]) -> bool:
        """Whether it holds so many tokens of each of these."""
        return all(len(self.held.get(rid, [])) == n for rid, n in running.items())

    def is_restored_after(self, cause: str) -> bool:
        """Whether it was demoted for this and is not any more."""
        causes = [event.get("cause", event["event"]) for event in self.events]
        return cause in causes and "restored" in causes[causes.index(cause) :]


@asynccontextmanager
async def tail(address: str) -> AsyncGenerator[Tail]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.cli.main", "tail", "--json", "--address", address),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
        limit=KIB,
    )
    try:
        yield Tail(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_process_that_reads_no_socket_knows_what_it_missed_and_catches_up(
    tmp_path: Path,
) -> None:
    async with (
        scripted_fleet(tmp_path) as fleet,
        EventReader(rolloutbus.subscribe(fleet.address)) as quick,
        tail(fleet.address) as slow,
    ):
        fleet.running["first/1"] = 0
        await meanwhile(slow.read_until(lambda: bool(slow.held)), fleet.step)
        await quick.until(lambda: bool(quick.of(Tokens)))

        # From here on nobody reads what the tail says.
        heard = quick.subscriber.heard
        enough = heard.frames_in + MORE_THAN_SOCKETS_HOLD
        n_rounds = 0
        while heard.frames_in < enough:
            n_rounds += 1
            rids = [f"c{n}/{n_rounds}" for n in range(N_CLIENTS)]
            await fleet.sample(rids, N_STEPS)
            for rid in rids:
                assert (await quick.end(rid)).tokens.tolist() == tokens_of(N_STEPS)

        rids = [f"c{n}/0" for n in range(N_CLIENTS)]
        fleet.running |= dict.fromkeys(rids, 0)
        await fleet.step()
        await meanwhile(
            slow.read_until(lambda: slow.is_restored_after("socket") and slow.has(fleet.running)),
            fleet.heartbeat,
        )
        await fleet.step()
        n_tokens = dict(fleet.running)
        for rid in n_tokens:
            await fleet.finish(rid)
        await slow.read_until(lambda: n_tokens.keys() <= slow.ends.keys())
    for rid, n in n_tokens.items():
        assert slow.ends[rid]["tokens"] == slow.held[rid] == tokens_of(n)
    n_whole = sum(end["tokens"] == tokens_of(N_STEPS) for end in slow.ends.values())
    assert n_whole < N_CLIENTS * n_rounds, "nothing was lost: it has shown nothing"


async def meanwhile(work: Coroutine[Any, Any, None], again: Callable[[], Awaitable[None]]) -> None:
    """Do this again and again until the work is done: what is published may be lost."""
    working = asyncio.ensure_future(work)
    while not working.done():
        await again()
        await asyncio.wait([working], timeout=PACE_S)
    working.result()
