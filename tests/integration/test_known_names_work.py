"""What users of other engines know by name, on the transformers engine: what no other test has."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from tests.integration.conftest import REAL_ENGINES
from tests.integration.live_fleet import DEADLINE_S, STEADY_HOST
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "host": STEADY_HOST}
PROMPT = [3, 10, 20, 7]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
EOS = 2
TOLERANCE = 1e-4


@pytest.fixture
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def assert_true(reference: Reference, rollout: Rollout, version: int) -> None:
    """All of it was sampled with the reference's present weights, as this version."""
    reference.keep(version)
    assert [each for each, _ in rollout.version_runs] == [version]
    truth = reference.fresh(PROMPT, rollout, 1.0)
    assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


@pytest.mark.shows("session_ids")
async def test_each_row_of_a_batch_goes_where_its_session_is(client: RolloutClient) -> None:
    names = [f"row-{number}" for number in range(6)]
    turns = [
        await client.generate_batch([PROMPT] * 6, GREEDY, session=names, deadline_s=DEADLINE_S)
        for _ in range(2)
    ]
    first, second = [[rollout.worker for (rollout,) in rows] for rows in turns]
    assert first == second
    assert {*first} == {"w0", "w1"}


@pytest.mark.shows("loss mask")
async def test_only_what_was_sampled_counts_for_the_loss(client: RolloutClient) -> None:
    async with client.session("masked") as session:
        session.append(PROMPT)
        await session.sample(GREEDY, deadline_s=DEADLINE_S)
        session.append([EOS, 5, 6])
        mask = session.transcript.loss_mask.tolist()
    assert mask == [0] * len(PROMPT) + [1] * GREEDY.max_new_tokens + [0] * 3


@pytest.mark.shows(
    "start_weight_transfer",
    "WeightTransferHandle",
    "get_remote_weight_version",
    "weight_version label",
)
async def test_a_transfer_goes_on_while_its_trainer_trains(
    client: RolloutClient, reference: Reference
) -> None:
    reference.perturb(seed=1)
    trained = copy.deepcopy(reference.model)
    publisher = WeightPublisher(client)

    handle = publisher.start(trained, require="all", tag=100, deadline_s=DEADLINE_S)
    await handle.copied()
    with torch.no_grad():
        for weight in trained.parameters():
            weight.zero_()  # the next step of the training
    published = await handle

    rollout = await client.generate(PROMPT, GREEDY, versions="min-tag:100", deadline_s=DEADLINE_S)
    assert (await client.status()).committed["default"] == published.version
    assert_true(reference, rollout, published.version)


@pytest.mark.shows("partial updates", "cast to the engine's dtype")
@pytest.mark.parametrize("is_put", [True, False], ids=["tensor by tensor", "as a whole"])
async def test_tensors_of_another_dtype_become_the_engines(
    client: RolloutClient,
    reference: Reference,
    is_put: bool,
) -> None:
    reference.perturb(seed=2 + is_put)
    trained = cast("Any", copy.deepcopy(reference.model)).to(torch.bfloat16)
    with torch.no_grad():
        for exact, rounded in zip(reference.model.parameters(), trained.parameters(), strict=True):
            exact.copy_(rounded)
    named = list(trained.named_parameters())
    publisher = WeightPublisher(client, dtype=None if is_put else torch.float32)
    if is_put:
        layout = [(name, torch.float32, each.shape) for name, each in named]
        async with publisher.begin(layout=layout, require="all", deadline_s=DEADLINE_S) as update:
            for name, each in reversed(named):
                await update.put(name, each)
        published = update.published
    else:
        published = await publisher.publish(named, require="all", deadline_s=DEADLINE_S)
    assert published is not None
    rollout = await client.generate(PROMPT, GREEDY, versions="latest", deadline_s=DEADLINE_S)
    assert_true(reference, rollout, published.version)
