"""Whoever reads a stream, from wherever and whatever happens, reads the tokens of the result."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from bus.entry import Entry
from bus.ports import TopicBatchHandler
from bus.zmq_ports import DealerPort, SubPort
from launcher.plan import environment
from rolloutbus import Rollout, RolloutClient, Sampling
from tests.integration.drills import DEADLINE_S, Streamed, Watcher, facts_when
from trainer_adapter.connection import Ports
from trainer_adapter.settings import ClientSettings
from trainer_adapter.subscriber import StreamRow

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [3, 10, 20, 7]
N_TOKENS = 200
WATCHER = Path(__file__).with_name("stream_watcher.py")


def seeded(seed: int, n_tokens: int = N_TOKENS) -> Sampling:
    return Sampling(max_new_tokens=n_tokens, temperature=0.9, ignore_eos=True, seed=seed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model: Path) -> AsyncIterator[rolloutbus.Fleet]:
    options = {"threads": 1, "slots": 16}
    async with rolloutbus.up(
        model=str(tiny_model), workers=2, engine="transformers", engine_options=options
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: rolloutbus.Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address, name="streams") as connected:
        yield connected


def assert_same(streamed: Streamed, rollout: Rollout) -> None:
    assert streamed.is_contiguous
    assert streamed.tokens == rollout.tokens.tolist()
    assert streamed.logprobs == rollout.logprobs.tolist()
    reasons = [delta.finish_reason for delta in streamed.deltas]
    assert reasons == [None] * (len(reasons) - 1) + [rollout.finish_reason]


def assert_rows_are_tail(rows: Sequence[StreamRow], rollout: Rollout) -> None:
    """Rows without a jump, whose tokens are the result's from the first row's on."""
    start = rows[0].seq
    end = start
    for row in rows:
        assert row.seq == end
        end += len(row.tokens)
    assert [int(t) for row in rows for t in row.tokens] == rollout.tokens[start:].tolist()
    assert [float(v) for row in rows for v in row.logprobs] == rollout.logprobs[start:].tolist()
    assert rows[-1].finish == rollout.finish_reason


async def test_streams_equal_their_results_and_what_a_second_subscriber_sees(
    client: RolloutClient,
) -> None:
    async with Watcher(client) as watcher:
        # A subscription takes effect some time after it is made.
        while not watcher.rows:
            await client.generate(PROMPT, seeded(0, 1), deadline_s=DEADLINE_S)
        streams = [Streamed(client, [*PROMPT, i], seeded(i)) for i in range(12)]
        for streamed in streams:
            rollout = await streamed.rollout()
            assert len(rollout.tokens) == N_TOKENS
            assert_same(streamed, rollout)
            rows = await watcher.finished(streamed.rid)
            assert rows[0].seq == 0
            assert_rows_are_tail(rows, rollout)


async def test_the_public_stream_yields_what_generate_returns_for_the_same_seed(
    client: RolloutClient,
) -> None:
    rollout = await client.generate(PROMPT, seeded(5), deadline_s=DEADLINE_S)

    deltas = [delta async for delta in client.stream(PROMPT, seeded(5), deadline_s=DEADLINE_S)]

    assert [int(t) for delta in deltas for t in delta.tokens] == rollout.tokens.tolist()
    assert deltas[-1].finish_reason == rollout.finish_reason == "length"
    assert len(deltas) > N_TOKENS // 10, "the stream came in lumps"


async def test_a_subscriber_in_another_process_sees_the_same_stream(
    client: RolloutClient,
) -> None:
    endpoints = [member.stream for member in client.connection.members]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WATCHER),
        client.connection.settings.name,
        *endpoints,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        first = asyncio.create_task(process.stdout.readline())
        async with asyncio.timeout(DEADLINE_S):
            while not first.done():
                await client.generate(PROMPT, seeded(0, 1), deadline_s=DEADLINE_S)
        streamed = Streamed(client, PROMPT, seeded(1))
        rollout = await streamed.rollout()
        tokens: list[int] = []
        logprobs: list[float] = []
        finish = None
        async with asyncio.timeout(DEADLINE_S):
            while finish is None:
                row = json.loads(await process.stdout.readline())
                if row["rid"] == streamed.rid:
                    assert row["seq"] == len(tokens)
                    tokens += row["tokens"]
                    logprobs += row["logprobs"]
                    finish = row["finish"]
    finally:
        process.kill()
        await process.wait()

    assert_same(streamed, rollout)
    assert tokens == rollout.tokens.tolist()
    assert logprobs == rollout.logprobs.tolist()
    assert finish == rollout.finish_reason


async def test_a_late_subscriber_sees_the_rest_without_a_jump(client: RolloutClient) -> None:
    streamed = Streamed(client, PROMPT, seeded(2, 900))
    await streamed.reached(50)

    async with Watcher(client) as watcher:
        rollout = await streamed.rollout()
        rows = await watcher.finished(streamed.rid)

    assert 0 < rows[0].seq < 900
    assert_rows_are_tail(rows, rollout)
    assert_same(streamed, rollout)


class LossyNet:
    """Ports whose subscription loses batches on the way: the first ones, then every fourth."""

    def __init__(self) -> None:
        self.ports = Ports(DealerPort, self._subscription)
        self.n_lost = 0
        self._n_batches = 0

    def _subscription(self, on_batch: TopicBatchHandler, topics: Sequence[bytes]) -> SubPort:
        def lose_some(topic: bytes, entries: list[Entry]) -> None:
            self._n_batches += 1
            if self._n_batches <= 10 or self._n_batches % 4 == 0:
                self.n_lost += 1
            else:
                on_batch(topic, entries)

        return SubPort(lose_some, topics)


async def test_rows_that_got_lost_are_repaired(fleet: rolloutbus.Fleet) -> None:
    net = LossyNet()
    settings = ClientSettings(name="lossy", router=fleet.address)
    async with RolloutClient(settings, net.ports) as client:
        streams = [Streamed(client, [*PROMPT, i], seeded(i)) for i in range(4)]
        for streamed in streams:
            await streamed.reached(N_TOKENS // 2)
            rollout = await streamed.rollout()
            assert_same(streamed, rollout)
            assert rollout.n_attempts == 1
        assert net.n_lost > 10
        assert client.connection.counters.repairs > 0
        assert client.connection.counters.stream_mismatches == 0


async def test_leaving_a_stream_early_stops_its_request_at_the_worker(
    client: RolloutClient,
) -> None:
    async with Watcher(client) as watcher:
        stream = client.stream(PROMPT, seeded(3, 900), deadline_s=DEADLINE_S)
        rid = (await anext(stream)).rid
        await watcher.seen(lambda: rid in watcher.rows)
        await stream.aclose()
        await watcher.seen(lambda: watcher.endings(rid) == ["abort"])

    await facts_when(client, lambda facts: sum(each.n_running for each in facts.values()) == 0)


async def test_cancelling_a_waiting_call_stops_its_request_at_the_worker(
    client: RolloutClient,
) -> None:
    async with Watcher(client) as watcher:
        known = set(watcher.rows)
        call = asyncio.create_task(client.generate(PROMPT, seeded(4, 900), deadline_s=DEADLINE_S))
        await watcher.seen(lambda: len(watcher.rows) > len(known))
        call.cancel()
        [rid] = set(watcher.rows) - known
        await watcher.seen(lambda: watcher.endings(rid) == ["abort"])

    await facts_when(client, lambda facts: sum(each.n_running for each in facts.values()) == 0)


async def test_a_stream_goes_on_without_a_seam_when_its_worker_is_killed(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    undisturbed = await client.generate(PROMPT, seeded(6, 900), deadline_s=DEADLINE_S)
    async with Watcher(client) as watcher:
        streamed = Streamed(client, PROMPT, seeded(6, 900))
        await streamed.reached(40)
        await watcher.seen(lambda: streamed.rid in watcher.rows)
        victim = watcher.rows[streamed.rid][0].worker
        fleet.kill(victim)
        rollout = await streamed.rollout()

    assert_same(streamed, rollout)
    assert rollout.n_resumed >= 40
    assert rollout.n_attempts == 2
    assert rollout.worker != victim
    assert rollout.tokens.tolist() == undisturbed.tokens.tolist()
