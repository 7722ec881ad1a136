"""Adapters in the real SGLang on a GPU: rows of one batch use different ones; one is replaced."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.control import Adapters, ServerFacts
from rolloutbus.errors import Refused
from rolloutbus.launcher.settings import UpOptions
from tests.gpu.gpu_fleets import DEADLINE_S, Served, gpu_fleet, running
from tests.gpu.tiny import FAR, NEAR, error_of, load_tiny, save_tiny
from tests.integration.live_fleet import Streamed
from tests.lora_adapters import TARGETS, Lora, random_lora

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_RANK, ROOM, SCALE = 16, 4, 0.1
N_EACH = 8
N_BEFORE = 20
SAMPLING = SamplingParams(max_new_tokens=64, temperature=1.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=3000, temperature=1.0, ignore_eos=True)


def lora_fleet(path: Path, **arguments: Any) -> UpOptions:  # noqa: ANN401
    """One worker with room for some adapters; `arguments` are SGLang's own."""
    return gpu_fleet(
        path,
        enable_lora=True,
        max_lora_rank=MAX_RANK,
        lora_target_modules=list(TARGETS),
        max_loras_per_batch=ROOM,
        max_loaded_loras=ROOM,
        **arguments,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    async with running(lora_fleet(path)) as client:
        yield Served(client, load_tiny(path))


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def room(served: Served) -> AsyncIterator[None]:
    """Each test begins without adapters."""
    yield
    for name in (await served.client.server_info()).only(ServerFacts).adapters:
        (await served.client.unload_lora(name)).only(Adapters)


async def publish(client: RolloutClient, name: str, lora: Lora) -> int:
    return (
        await WeightPublisher(client).publish_lora(name, lora.tensors, alpha=lora.alpha)
    ).version


def assert_from(
    name: str, models: Mapping[str, Any], prompt: Sequence[int], rollout: Rollout
) -> None:
    """The rollout is of the model of this name, and of none of the others."""
    errors = {each: error_of(model, prompt, rollout) for each, model in models.items()}
    assert errors.pop(name) < NEAR, name
    assert min(errors.values()) > FAR, (name, errors)


@pytest.mark.shows("load_lora_adapter_from_tensors", "lora_request")
async def test_rows_of_one_batch_use_different_adapters_and_none(served: Served) -> None:
    await assert_rows_use_their_adapters(served)


@pytest.mark.shows("lora_backend")
async def test_rows_use_their_adapters_by_the_triton_backend_too(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "llama")
    async with running(lora_fleet(path, lora_backend="triton")) as client:
        await assert_rows_use_their_adapters(Served(client, load_tiny(path)))


async def assert_rows_use_their_adapters(served: Served) -> None:
    client, model = served
    adapters = {
        "all": random_lora(model, 1, scale=SCALE),
        "some": random_lora(model, 2, rank=MAX_RANK, targets=["k_proj", "up_proj"], scale=SCALE),
    }
    for name, lora in adapters.items():
        await publish(client, name, lora)
    loras = ["all", "", "some"] * N_EACH
    prompts = [[5 + row, 6, 7, 8] for row in range(len(loras))]

    rollouts = await asyncio.gather(
        *(
            client.generate(prompt, SAMPLING, lora=lora, deadline_s=DEADLINE_S)
            for prompt, lora in zip(prompts, loras, strict=True)
        )
    )

    models = {"": model} | {name: lora.merged(model) for name, lora in adapters.items()}
    for name, prompt, rollout in zip(loras, prompts, rollouts, strict=True):
        assert_from(name, models, prompt, rollout)


@pytest.mark.shows("update_weights_from_lora")
async def test_an_adapter_is_replaced_while_others_serve(served: Served) -> None:
    client, model = served
    old, new, other = (random_lora(model, seed, scale=SCALE) for seed in (11, 12, 13))
    models = {
        name: lora.merged(model) for name, lora in (("old", old), ("new", new), ("other", other))
    }
    first = await publish(client, "swapped", old)
    await publish(client, "other", other)
    prompt = [5, 6, 7, 8]
    on_old = Streamed(client, prompt, LONG, lora="swapped", deadline_s=DEADLINE_S)
    on_other = Streamed(client, prompt, LONG, lora="other", deadline_s=DEADLINE_S)
    await on_old.reached(N_BEFORE)
    await on_other.reached(N_BEFORE)

    second = await publish(client, "swapped", new)
    lora = f"swapped@{second}"
    after = await client.generate(prompt, SAMPLING, lora=lora, deadline_s=DEADLINE_S)

    assert_from("new", models, prompt, after)
    assert_from("old", models, prompt, await on_old.rollout(DEADLINE_S))
    assert_from("other", models, prompt, await on_other.rollout(DEADLINE_S))
    with pytest.raises(Refused, match=f"swapped@{first} is not loaded"):
        await client.generate(prompt, SAMPLING, lora=f"swapped@{first}", deadline_s=DEADLINE_S)


async def test_an_update_of_the_weights_keeps_the_adapters(served: Served) -> None:
    client, model = served
    lora = random_lora(model, 61, scale=SCALE)
    await publish(client, "kept", lora)
    changed = random_lora(model, 62, scale=SCALE).merged(model)
    models = {"": model, "with": lora.merged(changed), "without": changed}
    prompt = [5, 6, 7, 8]
    publisher = WeightPublisher(client)

    bfloat16 = {name: each.bfloat16() for name, each in changed.named_parameters()}
    await publisher.publish(bfloat16, require="all", deadline_s=DEADLINE_S)
    with_it = await client.generate(prompt, SAMPLING, lora="kept", deadline_s=DEADLINE_S)
    without = await client.generate(prompt, SAMPLING, deadline_s=DEADLINE_S)
    bfloat16 = {name: each.bfloat16() for name, each in model.named_parameters()}
    await publisher.publish(bfloat16, require="all", deadline_s=DEADLINE_S)

    assert_from("with", models, prompt, with_it)
    assert_from("without", models, prompt, without)
