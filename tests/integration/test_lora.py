"""Adapters that a trainer publishes: rollouts with any of them are those of the merged model."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from bus.messages.control import ServerFacts
from bus.messages.engine import Adapters
from rolloutbus import Fleet, FleetStatus, Rollout, RolloutClient, Sampling, WeightPublisher
from rolloutbus.errors import Refused, RequestError, SettingsError
from tests.integration.conftest import REAL_ENGINES
from tests.integration.drills import DEADLINE_S, ENDLESS, Streamed, status_when
from tests.lora_adapters import Lora, random_lora
from tests.tiny_models import fresh

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET = REAL_ENGINES
TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9]
SAMPLING = Sampling(max_new_tokens=32, temperature=1.0, ignore_eos=True)
LONG = Sampling(max_new_tokens=ENDLESS, ignore_eos=True)
N_BEFORE = 30
N_EACH = 6


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    loaders = cast("Any", transformers.AutoModelForCausalLM)
    return loaders.from_pretrained(tiny_model, dtype=torch.float32).eval()


async def publish(client: RolloutClient, name: str, lora: Lora) -> int:
    published = await WeightPublisher(client).publish_lora(name, lora.tensors, alpha=lora.alpha)
    assert sorted(published.workers) == ["w0", "w1"]
    return published.version


def assert_from(model: Any, rollout: Rollout, prompt: Sequence[int] = PROMPT) -> None:  # noqa: ANN401
    tokens = np.array([*prompt, *rollout.tokens], np.int32)
    truth = np.array(fresh(model, tokens, len(prompt)))
    assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


def ready_epochs(status: FleetStatus) -> set[tuple[str, str]]:
    """(worker, epoch) of those that serve."""
    return {(each.name, each.epoch) for each in status.workers if each.state == "ready"}


async def test_rollouts_with_each_adapter_and_without_run_side_by_side(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    adapters = {"one": random_lora(model, 1), "two": random_lora(model, 2, rank=2)}
    for name, lora in adapters.items():
        await publish(client, name, lora)
    loras = ["one", "", "two"] * N_EACH

    rollouts = await asyncio.gather(
        *(client.generate(PROMPT, SAMPLING, lora=lora, deadline_s=DEADLINE_S) for lora in loras)
    )

    truths = {"": model} | {name: lora.merged(model) for name, lora in adapters.items()}
    for lora, rollout in zip(loras, rollouts, strict=True):
        assert_from(truths[lora], rollout)


async def test_a_new_version_serves_new_rollouts_and_leaves_the_others_alone(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    old, new, other = (random_lora(model, seed) for seed in (11, 12, 13))
    first = await publish(client, "swapped", old)
    await publish(client, "other", other)
    on_old = Streamed(client, PROMPT, LONG, lora="swapped")
    on_other = Streamed(client, PROMPT, LONG, lora="other")
    await on_old.reached(N_BEFORE)
    await on_other.reached(N_BEFORE)

    second = await publish(client, "swapped", new)
    await on_old.grown_by(N_BEFORE)
    await on_other.grown_by(N_BEFORE)
    after = await client.generate(PROMPT, SAMPLING, lora=f"swapped@{second}", deadline_s=DEADLINE_S)

    assert_from(old.merged(model), await on_old.cut())
    assert_from(other.merged(model), await on_other.cut())
    assert_from(new.merged(model), after)
    with pytest.raises(Refused, match=f"swapped@{first} is not loaded") as caught:
        await client.generate(PROMPT, SAMPLING, lora=f"swapped@{first}", deadline_s=DEADLINE_S)
    assert caught.value.field == "lora"


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


async def test_engines_that_are_replaced_have_their_adapters_again(
    fleet: Fleet,
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 51)
    version = await publish(client, "again", lora)
    streamed = Streamed(client, PROMPT, LONG, lora=f"again@{version}", deadline_s=2 * DEADLINE_S)
    await streamed.reached(N_BEFORE)
    before = ready_epochs(await client.status())

    for name in fleet.worker_names:
        for host in fleet.host_pids(name):
            os.kill(host, signal.SIGKILL)
    await status_when(
        client, lambda now: len(epochs := ready_epochs(now)) == len(before) and not epochs & before
    )
    await streamed.grown_by(N_BEFORE)
    rollout = await streamed.cut()

    assert rollout.n_resumed >= N_BEFORE
    assert_from(lora.merged(model), rollout)


async def test_a_rollout_whose_worker_dies_goes_on_with_its_adapter_elsewhere(
    fleet: Fleet,
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 31)
    version = await publish(client, "survivor", lora)
    streamed = Streamed(client, PROMPT, LONG, lora=f"survivor@{version}")
    await streamed.reached(N_BEFORE)
    victim = streamed.worker

    fleet.kill(victim)
    await streamed.seen(lambda: streamed.worker != victim)
    await streamed.grown_by(N_BEFORE)
    rollout = await streamed.cut()

    assert rollout.n_resumed >= N_BEFORE
    assert_from(lora.merged(model), rollout)
