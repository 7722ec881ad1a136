"""A whole fleet takes its weights from the trainer's broadcast."""

import pytest
import torch

from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

WORKERS = ["w0", "w1"]
FLEET: UpOptions = {
    "workers": len(WORKERS),
    "engine": "fake",
    "engine_options": {"slots": 4, "step_s": 0.005},
}
SIZE_BYTES = 128 + 16


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.full((8, 4), value), "head.weight": torch.full((4,), value)}


async def test_all_workers_take_version_after_version_from_the_broadcast(
    client: RolloutClient,
) -> None:
    publisher = WeightPublisher(client)
    for step in (1.0, 2.0):
        published = await publisher.publish(
            weights(step), transport="collective", require="all", deadline_s=DEADLINE_S
        )
        assert published.transport == dict.fromkeys(WORKERS, "collective"), published.why
        assert published.moved_bytes == dict.fromkeys(WORKERS, SIZE_BYTES)
        ended = await client.generate(
            [1, 2, 3], SamplingParams(max_new_tokens=4), deadline_s=DEADLINE_S, versions="latest"
        )
        assert [version for version, _ in ended.version_runs] == [published.version]
    publisher.forget()


async def test_workers_meet_at_a_host_that_is_given_by_its_name(client: RolloutClient) -> None:
    publisher = WeightPublisher(client)
    publisher.offer("collective", CollectiveOffering(host="localhost"))
    published = await publisher.publish(
        weights(2.5), transport="collective", require="all", deadline_s=DEADLINE_S
    )
    assert published.transport == dict.fromkeys(WORKERS, "collective"), published.why
    publisher.forget()


async def test_nobody_waits_for_a_broadcast_that_was_not_asked_for(client: RolloutClient) -> None:
    published = await WeightPublisher(client).publish(
        weights(3.0), require="all", deadline_s=DEADLINE_S
    )
    assert published.transport == dict.fromkeys(WORKERS, "shm")
