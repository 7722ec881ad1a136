"""Whoever reads a stream, from wherever and whatever happens, reads the tokens of the result."""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.transport.ports import TopicBatchHandler
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_topics import SubPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.events import GapRepaired, Tokens
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.connection import Ports
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.conftest import REAL_ENGINES
from tests.integration.event_reader import EventReader
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    START_S,
    UNHURRIED,
    Streamed,
    facts_when,
    status_when,
    worker_in,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "lease": UNHURRIED}
PROMPT = [3, 10, 20, 7]
N_TOKENS = 200
WATCHER = Path(__file__).with_name("stream_watcher.py")


def seeded(seed: int, n_tokens: int = N_TOKENS) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=n_tokens, temperature=0.9, ignore_eos=True, sampling_seed=seed
    )


def assert_same(streamed: Streamed, rollout: Rollout) -> None:
    assert streamed.is_contiguous
    assert streamed.tokens == rollout.tokens.tolist()
    assert streamed.logprobs == rollout.logprobs.tolist()
    reasons = [delta.finish_reason for delta in streamed.deltas]
    assert reasons == [None] * (len(reasons) - 1) + [rollout.finish_reason]


async def test_streams_equal_their_results_and_what_a_second_subscriber_sees(
    client: RolloutClient,
) -> None:
    async with EventReader.streams_of(client) as seen:
        await seen.hears_everyone(client)
        streams = [Streamed(client, [*PROMPT, i], seeded(i)) for i in range(12)]
        for streamed in streams:
            rollout = await streamed.rollout()
            assert len(rollout.tokens) == N_TOKENS
            assert_same(streamed, rollout)
            await seen.whole(rollout)


async def test_the_public_stream_yields_what_generate_returns_for_the_same_seed(
    client: RolloutClient,
) -> None:
    rollout = await client.generate(PROMPT, seeded(5), deadline_s=DEADLINE_S)

    deltas = [delta async for delta in client.stream(PROMPT, seeded(5), deadline_s=DEADLINE_S)]

    assert [int(t) for delta in deltas for t in delta.tokens] == rollout.tokens.tolist()
    assert deltas[-1].finish_reason == rollout.finish_reason == "length"


async def everyone_is_heard(
    client: RolloutClient, rows: asyncio.StreamReader, workers: set[str]
) -> None:
    """Generate until rows of all workers came through: subscriptions take effect in time."""
    heard: set[str] = set()
    async with asyncio.timeout(START_S):
        while heard < workers:
            line = asyncio.create_task(rows.readline())
            while not line.done():
                await client.generate(PROMPT, seeded(0, 1), deadline_s=DEADLINE_S)
            heard.add(json.loads(line.result())["worker"])


async def test_a_subscriber_in_another_process_sees_the_same_stream(
    client: RolloutClient,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WATCHER),
        client.connection.settings.router,
        client.connection.settings.name,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    workers = {member.name for member in client.connection.members}
    try:
        await everyone_is_heard(client, process.stdout, workers)
        streamed = Streamed(client, PROMPT, seeded(1))
        rollout = await streamed.rollout()
        tokens: list[int] = []
        logprobs: list[float] = []
        row: dict[str, Any] = {"finish": None}
        async with asyncio.timeout(DEADLINE_S):
            while row["finish"] is None:
                told = json.loads(await process.stdout.readline())
                row = told if told["rid"] == streamed.rid else row
                if row is told and row["finish"] is None:
                    assert row["start"] == len(tokens)
                    tokens += row["tokens"]
                    logprobs += row["logprobs"]
    finally:
        process.kill()
        await process.wait()

    assert_same(streamed, rollout)
    assert tokens == row["tokens"] == rollout.tokens.tolist()
    assert logprobs == row["logprobs"] == rollout.logprobs.tolist()
    assert row["finish"] == rollout.finish_reason


async def test_a_late_subscriber_is_told_from_the_first_token(client: RolloutClient) -> None:
    streamed = Streamed(client, PROMPT, seeded(2, ENDLESS))
    await streamed.reached(50)

    async with EventReader.streams_of(client) as seen:
        await seen.until(lambda: len(seen.tokens(streamed.rid)) > 70)
        await seen.whole(await streamed.cut())
    assert seen.of(GapRepaired)


class LossyNet:
    """Ports whose subscription loses batches on the way: the first ones, then a quarter of them.

    Which ones is drawn: rows of one stream may be in every fourth batch, and nowhere else.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.ports = Ports(DealerPort, self._subscription)
        self.n_lost = 0
        self._n_batches = 0

    def _subscription(self, on_batch: TopicBatchHandler, clients: Sequence[str]) -> SubPort:
        def lose_some(topic: bytes, entries: list[Entry]) -> None:
            self._n_batches += 1
            if self._n_batches <= 10 or self._rng.random() < 0.25:
                self.n_lost += 1
            else:
                on_batch(topic, entries)

        return SubPort(lose_some, clients)


async def test_rows_that_got_lost_are_repaired(fleet: rolloutbus.Fleet, rng: random.Random) -> None:
    net = LossyNet(rng)
    settings = ClientSettings(name="lossy", router=fleet.address, overtime_s=DEADLINE_S)
    async with RolloutClient(settings, net.ports) as client:
        streams = [Streamed(client, [*PROMPT, i], seeded(i, ENDLESS)) for i in range(4)]
        counters = client.connection.counters
        for streamed in streams:
            await streamed.reached(N_TOKENS)
        await streams[0].seen(lambda: net.n_lost > 10 and counters.repairs > 0)
        for streamed in streams:
            rollout = await streamed.cut()
            assert streamed.is_contiguous
            assert rollout.n_attempts == 1
        assert counters.stream_mismatches == 0


async def test_leaving_a_stream_early_stops_its_request_at_the_worker(
    client: RolloutClient,
) -> None:
    async with EventReader.streams_of(client) as seen:
        stream = client.stream(PROMPT, seeded(3, ENDLESS), deadline_s=DEADLINE_S)
        rid = (await anext(stream)).rid
        await seen.until(lambda: bool(seen.tokens(rid)))
        await stream.aclose()
        assert (await seen.end(rid)).finish_reason == "abort"

    await facts_when(client, lambda facts: sum(each.n_running for each in facts.values()) == 0)


async def test_cancelling_a_waiting_call_stops_its_request_at_the_worker(
    client: RolloutClient,
) -> None:
    async with EventReader.streams_of(client) as seen:
        call = asyncio.create_task(
            client.generate(PROMPT, seeded(4, ENDLESS), deadline_s=DEADLINE_S)
        )
        await seen.until(lambda: bool(seen.of(Tokens)))
        call.cancel()
        [rid] = {event.rid for event in seen.of(Tokens)}
        assert (await seen.end(rid)).finish_reason == "abort"

    await facts_when(client, lambda facts: sum(each.n_running for each in facts.values()) == 0)


async def test_a_stream_goes_on_without_a_seam_when_its_worker_is_killed(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    streamed = Streamed(client, PROMPT, seeded(6, ENDLESS), deadline_s=START_S)
    await streamed.reached(40)
    victim = worker_in(await client.status(), streamed.worker)
    assert victim is not None
    fleet.kill(victim.name)
    # It goes on at the other one, or at the next process of this name if that is there first.
    await status_when(
        client,
        lambda status: (now := worker_in(status, victim.name)) is None or now.epoch != victim.epoch,
    )
    await streamed.grown_by(40)
    rollout = await streamed.cut()

    assert streamed.is_contiguous
    assert rollout.n_resumed >= 40
    assert rollout.n_attempts == 2
    undisturbed = await client.generate(PROMPT, seeded(6, len(rollout.tokens)), deadline_s=START_S)
    assert rollout.tokens.tolist() == undisturbed.tokens.tolist()
