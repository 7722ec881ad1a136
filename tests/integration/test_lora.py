"""Adapters that a trainer publishes: rollouts with any of them are those of the merged model."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

import rolloutbus
from rolloutbus import Fleet, RolloutClient, WeightPublisher
from rolloutbus.bus.wire.messages.control import Adapters, ServerFacts
from rolloutbus.errors import BusError, RequestError, SettingsError
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration import lora_steps
from tests.integration.conftest import REAL_ENGINES
from tests.integration.live_fleet import DEADLINE_S, START_S, STEADY_HOST, Streamed, status_when
from tests.integration.lora_steps import LONG, N_BEFORE, PROMPT, SAMPLING, Swap, publish
from tests.lora_adapters import assert_from, random_lora

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "host": STEADY_HOST}
N_EACH = 6


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    loaders = cast("Any", transformers.AutoModelForCausalLM)
    return loaders.from_pretrained(tiny_model, dtype=torch.float32).eval()


def ready_epochs(status: FleetStatus) -> set[tuple[str, str]]:
    """(worker, epoch) of those that serve."""
    return {(each.name, each.epoch) for each in status.workers if each.state == "ready"}


async def all_began_anew(client: RolloutClient, before: set[tuple[str, str]]) -> None:
    """Wait until as many serve as before, none of them in the same epoch."""
    await status_when(
        client,
        lambda now: len(epochs := ready_epochs(now)) == len(before) and not epochs & before,
        START_S,
    )


@pytest.mark.shows("load_lora_adapter_from_tensors")
async def test_rollouts_with_each_adapter_and_without_run_side_by_side(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    adapters = {"one": random_lora(model, 1), "two": random_lora(model, 2, rank=2)}
    await lora_steps.adapters_run_side_by_side(client, model, adapters, N_EACH)


@pytest.mark.shows("lora_name")
async def test_a_new_version_serves_new_rollouts_and_leaves_the_others_alone(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    swap = Swap(*(random_lora(model, seed) for seed in (11, 12, 13)))
    await lora_steps.a_new_version_leaves_the_others_alone(client, model, swap)


async def test_workers_tell_which_adapters_they_have(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    version = await publish(client, "listed", random_lora(model, 21))

    told = (await client.server_info()).by_worker

    assert set(told) == {"w0", "w1"}
    for facts in told.values():
        assert isinstance(facts, ServerFacts)
        assert facts.adapters["listed"] == version
    forgotten = await client.unload_lora("listed")
    for each in forgotten.by_worker.values():
        assert isinstance(each, Adapters)
        assert "listed" not in each.adapters


async def test_an_adapter_that_no_worker_can_use_is_an_error(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    good = random_lora(model, 41)
    elsewhere = {name.replace("layers.1", "layers.7"): each for name, each in good.tensors.items()}

    with pytest.raises(RequestError, match="no linear module"):
        await WeightPublisher(client).publish_lora("bad", elsewhere, alpha=4.0)


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)},
        {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)},
    ],
    ids=["no factors", "half a pair"],
)
async def test_what_is_no_adapter_is_not_published(
    client: RolloutClient, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(SettingsError, match="this is no adapter"):
        await WeightPublisher(client).publish_lora("none", tensors, alpha=4.0)


async def test_an_adapter_leaves_the_question_for_the_last_outcome_to_the_model() -> None:
    good = {"embed.weight": torch.rand(8, 4), "head.weight": torch.rand(4)}
    factors = {"m.lora_A.weight": torch.rand(2, 4), "m.lora_B.weight": torch.rand(4, 2)}
    async with (
        rolloutbus.up(engine="fake", workers=1) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        await publisher.publish(good)
        with pytest.raises(BusError):
            await publisher.publish({**good, "head.weight": torch.rand(5)})
        assert await publisher.outcome() == "not_committed"
        with pytest.raises(BusError):  # this engine takes no adapters
            await publisher.publish_lora("other", factors, alpha=1.0)
        assert await publisher.outcome() == "not_committed"


async def test_engines_that_are_replaced_have_their_adapters_again(
    fleet: Fleet,
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 51)
    version = await publish(client, "again", lora)
    streamed = Streamed(client, PROMPT, LONG, lora=f"again@{version}", deadline_s=2 * START_S)
    await streamed.reached(N_BEFORE)
    before = ready_epochs(await client.status())

    for name in fleet.worker_names:
        for host in fleet.host_pids(name):
            os.kill(host, signal.SIGKILL)
    await all_began_anew(client, before)
    await streamed.grown_by(N_BEFORE)
    rollout = await streamed.cut()

    assert rollout.n_resumed >= N_BEFORE
    assert_from(lora.merged(model), PROMPT, rollout)


async def test_workers_that_start_again_are_brought_the_adapters_before_they_serve(
    fleet: Fleet,
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 61)
    version = await publish(client, "lasting", lora)
    before = ready_epochs(await client.status())
    for name in fleet.worker_names:
        fleet.kill(name)
    await all_began_anew(client, before)
    rollouts = await asyncio.gather(
        *(
            client.generate(PROMPT, SAMPLING, lora=f"lasting@{version}", deadline_s=DEADLINE_S)
            for _ in range(N_EACH)
        )
    )
    for rollout in rollouts:
        assert_from(lora.merged(model), PROMPT, rollout)


async def test_a_rollout_whose_worker_dies_goes_on_with_its_adapter_elsewhere(
    fleet: Fleet,
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 31)
    version = await publish(client, "survivor", lora)
    streamed = Streamed(client, PROMPT, LONG, lora=f"survivor@{version}", deadline_s=START_S)
    await streamed.reached(N_BEFORE)
    victim = streamed.worker

    fleet.kill(victim)
    await streamed.seen(lambda: streamed.worker != victim)
    await streamed.grown_by(N_BEFORE)
    rollout = await streamed.cut()

    assert rollout.n_resumed >= N_BEFORE
    assert_from(lora.merged(model), PROMPT, rollout)
