"""Sessions of agents on a live fleet: a turn finds its worker, before all that wait."""

import asyncio

import pytest

from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.errors import Refused
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.session import Session
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    assert_fake_rollout,
    fake_sampling,
    status_when,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(4 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

N_WORKERS, SLOTS, N_COMPETING = 2, 4, 200
AT_ONCE = SLOTS + SLOTS // 4 + 1
"""Requests that a worker is given: what it runs, and a small queue."""
FLEET: UpOptions = {
    "workers": N_WORKERS,
    "engine": "fake",
    "engine_options": {"slots": SLOTS, "step_s": 0.001},
    "store": False,
    "lease": LeaseSettings(lease_s=12.0, holder_s=9.6, recovery_s=12.5, silence_s=9.0),
}
"""A busy machine ends no lease and no connection: a session moves when its worker dies, and its
client is told so."""
N_TOKENS = 20


class Order:
    """Requests under way, and in which order they end."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._futures: list[asyncio.Future[Result]] = []
        self.rollouts: list[Rollout] = []
        """In the order in which they ended."""

    def submit(self, prompt: list[int], sampling: SamplingParams, session: str = "") -> str:
        options: GenerateOptions = {"session": session}
        rid, future = self._client.connection.submit(
            ask_of(prompt, sampling, **options), DEADLINE_S
        )
        future.add_done_callback(self._ended)
        self._futures.append(future)
        return rid

    async def all_ended(self) -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await asyncio.gather(*self._futures)

    def _ended(self, future: asyncio.Future[Result]) -> None:
        rollout = future.result()
        assert isinstance(rollout, Rollout)
        self.rollouts.append(rollout)


async def take_turn(session: Session, prompt: list[int]) -> Rollout:
    rollout = await session.generate(prompt, fake_sampling(N_TOKENS), deadline_s=START_S)
    assert_fake_rollout(prompt, rollout, N_TOKENS)
    return rollout


async def test_the_second_turn_goes_to_its_worker_before_two_hundred_that_wait(
    client: RolloutClient, token_limit: TokenLimit
) -> None:
    n_waiting = N_COMPETING - N_WORKERS * AT_ONCE
    async with client.session("agent") as session:
        home = (await take_turn(session, [1, 2])).worker
        assert session.worker == home
        order = Order(client)
        with token_limit.at(5):
            for i in range(N_COMPETING):
                order.submit([7, i], fake_sampling(N_TOKENS))
            n_running = N_WORKERS * AT_ONCE
            await status_when(client, lambda s: (s.n_queued, s.n_running) == (n_waiting, n_running))
            turn = order.submit([1, 2, 3], fake_sampling(N_TOKENS), "agent")
            status = await client.status()
            assert (status.n_queued, status.n_running) == (n_waiting, n_running + 1)
            assert status.sessions == {home: 1}
        await order.all_ended()

        at_home = [rollout.rid for rollout in order.rollouts if rollout.worker == home]
        assert turn in at_home
        assert at_home.index(turn) < AT_ONCE + SLOTS
        assert session.n_moved == 0
    assert (await client.status()).sessions == {}


async def test_more_sessions_than_places_are_refused_until_one_closes(
    client: RolloutClient,
) -> None:
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        n_places = 2 * SLOTS * N_WORKERS
        leave = asyncio.Event()
        opened = asyncio.Queue[str]()

        async def hold_one(name: str) -> None:
            async with client.session(name) as session:
                opened.put_nowait(session.worker)
                await leave.wait()

        for i in range(n_places):
            group.create_task(hold_one(f"s{i}"))
        workers = [await opened.get() for _ in range(n_places)]
        assert {name: workers.count(name) for name in workers} == {
            "w0": n_places // 2,
            "w1": n_places // 2,
        }
        with pytest.raises(Refused) as caught:
            await client.session("one-more").__aenter__()
        assert caught.value.code == "busy"
        assert caught.value.retry_after_ms > 0
        waiting = group.create_task(hold_one_soon(client))
        leave.set()
        assert await waiting in {"w0", "w1"}


async def hold_one_soon(client: RolloutClient) -> str:
    async with client.session("patient", wait_s=DEADLINE_S) as session:
        return session.worker


async def test_a_session_is_where_it_was_after_the_router_was_killed(
    fleet: Fleet, client: RolloutClient
) -> None:
    before = (await client.status()).instance
    async with client.session("survivor", lease_s=600.0) as session:
        home = (await take_turn(session, [4, 5])).worker
        fleet.kill_router()
        await status_when(
            client, lambda s: s.instance != before and s.sessions == {home: 1}, START_S
        )
        await session.renew()
        rollout = await take_turn(session, [4, 5, 6])
        assert (rollout.worker, session.worker, session.n_moved) == (home, home, 0)


async def test_a_killed_worker_moves_its_session_exactly_once_and_says_so(
    fleet: Fleet, client: RolloutClient
) -> None:
    n_moved = client.connection.counters.sessions_moved
    # After a test that killed the router: an heir is there only when both are back.
    await status_when(client, lambda s: len(s.workers) == N_WORKERS and not s.recovering, START_S)
    async with client.session("unlucky", lease_s=600.0) as session:
        home = (await take_turn(session, [8, 9])).worker
        fleet.kill(home)
        rollouts = [await take_turn(session, [8, 9, i]) for i in range(3)]

        heir = session.worker
        assert {rollout.worker for rollout in rollouts} == {heir} != {home}
        move = session.last_move
        assert move is not None
        assert (move.from_worker, move.to_worker, move.reason) == (home, heir, "lost")
        assert session.n_moved == 1
        await status_when(client, lambda s: len(s.workers) == N_WORKERS, START_S)
        assert (await take_turn(session, [8, 9, 10])).worker == heir
    assert client.connection.counters.sessions_moved - n_moved == 1
