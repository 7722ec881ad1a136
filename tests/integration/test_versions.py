"""No request is ever served by weights that it did not allow, whatever happens to the fleet."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio
import torch

from rolloutbus import Fleet, Rollout, RolloutClient, WeightPublisher
from rolloutbus.bus.wire.messages.weights import InFlight, PublishVersion
from rolloutbus.errors import EngineFailed, Refused, StaleVersion
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    UNHURRIED,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    status_when,
    worker_in,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [4, 5, 6]
N_TOKENS = 200
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
WORKERS = ["w0", "w1", "w2"]
FLEET: UpOptions = {
    "workers": len(WORKERS),
    "engine": "fake",
    "engine_options": {"slots": 16, "step_s": 0.005},
    "lease": UNHURRIED,
}


@pytest_asyncio.fixture(loop_scope="module")
async def current(client: RolloutClient) -> int:
    """The last committed version, once every worker serves it."""
    status = await status_when(client, all_serve, START_S)
    return status.committed.get("default", 0)


def all_serve(status: FleetStatus) -> bool:
    """Nobody is missing, stale, paused or at an update."""
    committed = status.committed.get("default", 0)
    return sorted(worker.name for worker in status.workers) == WORKERS and all(
        (worker.version, worker.state) == (committed, "ready") for worker in status.workers
    )


async def publish(client: RolloutClient, in_flight: InFlight = "keep") -> int:
    published = await WeightPublisher(client).publish(
        WEIGHTS, in_flight=in_flight, require="all", deadline_s=DEADLINE_S
    )
    assert published.quarantined == {}
    assert sorted(published.stall_ms) == WORKERS
    return published.version


async def sample(
    client: RolloutClient, versions: str, n_tokens: int = 5, session: str = ""
) -> Rollout:
    rollout = await client.generate(
        PROMPT,
        fake_sampling(n_tokens),
        versions=versions,
        session=session,
        deadline_s=DEADLINE_S,
    )
    assert_fake_rollout(PROMPT, rollout, n_tokens)
    return rollout


async def session_away_from(client: RolloutClient, worker: str) -> str:
    """A session whose requests go to another worker."""
    for name in (f"away-{n}" for n in range(100)):
        if (await sample(client, "any", 1, name)).worker != worker:
            return name
    raise AssertionError(f"all requests go to {worker}")


async def test_a_request_for_a_coming_version_waits_until_it_is_published(
    client: RolloutClient, current: int
) -> None:
    rules = [f"min:{current + 1}", f"exact:{current + 1}"] * 4
    waiting = [asyncio.create_task(sample(client, rule)) for rule in rules]
    await status_when(client, lambda status: status.n_queued == len(rules))
    # A request for what is there is not kept waiting by those.
    assert (await sample(client, "latest")).version_runs == [(current, 5)]

    assert await publish(client) == current + 1

    for task in waiting:
        assert (await task).version_runs == [(current + 1, 5)]


@pytest.mark.parametrize("rule", ["min", "exact"])
async def test_a_request_for_a_version_that_never_comes_is_refused_at_its_deadline(
    client: RolloutClient, current: int, rule: str
) -> None:
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    with pytest.raises(StaleVersion) as caught:
        await client.generate(
            PROMPT, fake_sampling(5), versions=f"{rule}:{current + 9}", deadline_s=1.0
        )
    error = caught.value
    assert (error.code, error.field) == ("version_unavailable", "place.versions")
    assert error.outcome == "not_started"
    assert f"{rule}:{current + 9}" in str(error)
    assert loop.time() - asked_at > 0.9, "it was not given until its deadline"


async def test_a_version_that_is_gone_cannot_be_had(client: RolloutClient, current: int) -> None:
    assert (await sample(client, f"exact:{current}")).version_runs == [(current, 5)]

    await publish(client)

    with pytest.raises(StaleVersion):
        await client.generate(PROMPT, fake_sampling(5), versions=f"exact:{current}", deadline_s=0.5)


async def test_a_request_for_exactly_one_version_keeps_it_through_an_update(
    client: RolloutClient, current: int
) -> None:
    pinned = Streamed(client, PROMPT, fake_sampling(N_TOKENS), versions=f"exact:{current}")
    free = Streamed(client, PROMPT, fake_sampling(N_TOKENS))
    await pinned.reached(10)
    await free.reached(10)

    await publish(client)

    rollout = await pinned.rollout()
    assert_fake_rollout(PROMPT, rollout, N_TOKENS)
    assert rollout.version_runs == [(current, N_TOKENS)]
    assert_fake_rollout(PROMPT, await free.rollout(), N_TOKENS)


@pytest.mark.parametrize("in_flight", ["keep", "retract", "abort", "finish_old"])
async def test_nobody_gets_less_than_asked_for_while_versions_change(
    client: RolloutClient, current: int, in_flight: InFlight
) -> None:
    newest = current
    is_over = asyncio.Event()

    async def ask(rule: str, slack: int) -> int:
        n_rollouts = 0
        while not is_over.is_set():
            lowest = newest - slack
            rollout = await sample(client, rule.format(lowest), 20)
            versions = rollout.token_versions.tolist()
            assert versions == sorted(versions)
            assert versions[0] >= lowest, rule
            n_rollouts += 1
        return n_rollouts

    rules = [("latest", 0), ("min:{}", 0), ("max-staleness:1", 1), ("max-staleness:0", 0)]
    askers = [asyncio.create_task(ask(*rule)) for rule in rules * 2]
    for _ in range(3):
        newest = await publish(client, in_flight)
    is_over.set()

    assert all([await asker > 0 for asker in askers])
    assert newest == current + 3


async def test_a_restarted_worker_catches_up_before_it_serves(
    fleet: Fleet, client: RolloutClient, current: int
) -> None:
    version = current or await publish(client)
    before = worker_in(await client.status(), "w0")
    assert before is not None
    fleet.kill("w0")
    seen: list[Rollout] = []

    async def ask(rule: str) -> None:
        while not any(rollout.worker == "w0" and rollout.n_attempts == 1 for rollout in seen[8:]):
            seen.append(await sample(client, rule, 2))

    # Even `any` is never served by a worker that has not caught up.
    async with asyncio.timeout(START_S), asyncio.TaskGroup() as askers:
        for rule in ("latest", "any", "max-staleness:5", "any"):
            askers.create_task(ask(rule))

    assert {tuple(rollout.version_runs) for rollout in seen} == {((version, 2),)}
    status = await status_when(client, all_serve, START_S)
    after = worker_in(status, "w0")
    assert after is not None
    assert after.epoch != before.epoch
    assert status.counters["catch_ups"] >= 1


async def test_a_worker_killed_during_an_update_is_left_out_and_the_others_go_on(
    fleet: Fleet, client: RolloutClient, current: int
) -> None:
    session = await session_away_from(client, "w1")
    os.kill(fleet.pids["w1"], signal.SIGSTOP)  # it cannot answer, so the update must wait for it
    update = asyncio.create_task(
        WeightPublisher(client).publish(WEIGHTS, require="any", deadline_s=DEADLINE_S)
    )
    try:
        await status_when(client, lambda status: bool(status.updates))  # it counts on w1
        # The others serve on while the update waits, which it does until the lease is over.
        rollout = await sample(client, "any", 20, session)
    finally:
        fleet.kill("w1")
    published = await update
    assert {version for version, _ in rollout.version_runs} <= {current, published.version}

    assert published.version > current
    assert list(published.quarantined) == ["w1"]
    assert sorted(published.stall_ms) == ["w0", "w2"]
    rollout = await sample(client, "latest")
    assert rollout.version_runs == [(published.version, 5)]
    status = await status_when(client, all_serve, START_S)
    assert status.committed["default"] == published.version


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"embed.weight": torch.ones(8, 4), "nonsense": torch.ones(4)}, "nonsense"),
        ({"embed.weight": torch.ones(8, 4)}, "head.weight"),
        ({"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(5)}, "head.weight"),
        ({"embed.weight": torch.ones(8, 4).half(), "head.weight": torch.ones(4)}, "embed.weight"),
    ],
    ids=["unknown name", "missing name", "wrong shape", "wrong dtype"],
)
async def test_weights_that_do_not_fit_are_named_and_change_nothing(
    client: RolloutClient, current: int, tensors: dict[str, torch.Tensor], named: str
) -> None:
    with pytest.raises(EngineFailed) as caught:
        await WeightPublisher(client).publish(tensors, deadline_s=DEADLINE_S)

    assert caught.value.code == "update_failed"
    assert named in str(caught.value)
    status = await status_when(client, all_serve, START_S)
    assert status.committed.get("default", 0) == current
    assert (await sample(client, "latest")).version_runs == [(current, 5)]
    assert await publish(client) > current


async def test_an_older_version_cannot_be_published(client: RolloutClient, current: int) -> None:
    await publish(client)

    with pytest.raises(Refused) as caught:
        await client.ref().ask(PublishVersion("default", current), deadline_s=30.0)

    assert (caught.value.code, caught.value.field) == ("stale_version", "version")
    await status_when(client, all_serve, START_S)


async def test_an_update_that_would_wait_for_paused_requests_fails_without_harm(
    client: RolloutClient, current: int, token_limit: TokenLimit
) -> None:
    with token_limit.at(5):
        # Placement is by chance: enough of them that each worker has some.
        streams = [Streamed(client, PROMPT, fake_sampling(N_TOKENS)) for _ in range(24)]
        for streamed in streams:
            await streamed.reached(5)
        assert sorted({streamed.worker for streamed in streams}) == WORKERS
        epochs = {worker.name: worker.epoch for worker in (await client.status()).workers}
        await client.pause("in_place")

    published = await WeightPublisher(client).publish(
        WEIGHTS, in_flight="finish_old", deadline_s=DEADLINE_S
    )

    assert sorted(published.quarantined) == WORKERS
    await client.resume()
    for streamed in streams:
        rollout = await streamed.rollout()
        assert rollout.n_attempts == 1
    status = await status_when(client, all_serve, START_S)
    assert {worker.name: worker.epoch for worker in status.workers} == epochs
    assert status.committed["default"] > current
