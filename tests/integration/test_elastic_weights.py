"""A real engine that joins, or is restarted, has the committed weights before it serves."""

from pathlib import Path

import pytest

from rolloutbus import Fleet, RolloutClient, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.trained_model import GREEDY, greedy, tensors_of, trained

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 1, "engine_options": {"threads": 1, "slots": 2}}
PROMPT = [4, 5, 6]


@pytest.mark.shows("get_weight_version")
async def test_new_and_restarted_workers_sample_with_what_was_published(
    fleet: Fleet, client: RolloutClient, tiny_model: Path
) -> None:
    model = trained(tiny_model, seed=1)
    wanted = greedy(model, PROMPT)
    publisher = WeightPublisher(client)
    published = await publisher.publish(tensors_of(model), deadline_s=DEADLINE_S)
    for change in (fleet.scale(2), fleet.restart("w0")):
        await change
        for worker in fleet.worker_names:
            # `any`: nothing but its being there says that it has them.
            rollout = await client.generate(
                PROMPT, GREEDY, versions="any", worker=worker, deadline_s=DEADLINE_S
            )
            assert rollout.tokens.tolist() == wanted
            assert rollout.version_runs == [(published.version, len(wanted))]
