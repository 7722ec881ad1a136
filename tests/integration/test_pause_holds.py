"""A paused fleet of real processes stays paused, whoever is killed and comes back."""

import pytest

from rolloutbus import Fleet, RolloutClient
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    status_when,
    worker_in,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(4 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake"}
PROMPT, N_TOKENS = [1, 2, 3], 20


def are_paused(status: FleetStatus) -> bool:
    """Both workers are here, and neither serves."""
    return [worker.state for worker in status.workers] == ["paused", "paused"]


async def test_pause_holds_through_deaths_of_a_worker_and_the_router(
    fleet: Fleet, client: RolloutClient
) -> None:
    before = await client.status()
    w0 = worker_in(before, "w0")
    assert w0 is not None
    fleet.kill("w0")
    await client.pause(deadline_s=START_S)  # no error: the dead one is paused when it is back
    back = await status_when(
        client,
        lambda status: (
            (now := worker_in(status, "w0")) is not None
            and now.pid != w0.pid
            and are_paused(status)
        ),
        START_S,
    )
    assert (back.pause, back.fleet) == ("in_place", before.fleet)

    streamed = Streamed(client, PROMPT, fake_sampling(N_TOKENS), deadline_s=3 * START_S)
    await status_when(client, lambda status: status.n_queued == 1)
    fleet.kill_router()
    fleet.kill("w1")
    after = await status_when(
        client,
        lambda status: (
            status.instance != before.instance and not status.recovering and are_paused(status)
        ),
        START_S,
    )
    assert (after.pause, after.fleet) == ("in_place", before.fleet)
    assert (after.n_queued, after.n_running) == (1, 0)

    (await client.resume(deadline_s=DEADLINE_S)).check()
    assert_fake_rollout(PROMPT, await streamed.rollout(), N_TOKENS)
    assert (await client.status()).pause == ""
