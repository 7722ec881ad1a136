"""Adapters in the real SGLang: rollouts with any of them are those of the merged model."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

import rolloutbus
from rolloutbus import Rollout, RolloutClient, WeightPublisher
from rolloutbus.bus.wire.messages.control import Adapters, ServerFacts
from rolloutbus.engine_worker.engine import Float32s
from rolloutbus.errors import EngineFailed, FleetCommandFailed, Refused, RequestError
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration import lora_steps
from tests.integration.live_fleet import Streamed
from tests.integration.lora_steps import LONG, N_BEFORE, PROMPT, SAMPLING, Swap, publish
from tests.lora_adapters import TARGETS, assert_from, random_lora
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
MAX_RANK = 8
ROOM = 4
N_EACH = 4
SCALE = 0.2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RolloutClient]:
    """Of a fleet whose engine has room for a few adapters."""
    options = fleet_of(
        llama,
        enable_lora=True,
        max_lora_rank=MAX_RANK,
        lora_target_modules=list(TARGETS),
        max_loras_per_batch=ROOM,
        max_loaded_loras=ROOM,
    )
    folders = tmp_path_factory.mktemp("adapters")
    random_lora(load(llama), 41, scale=SCALE).save(folders / "in_files")
    options["weights_dir"] = folders
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="lora", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as connected:
            yield connected


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def room(client: RolloutClient) -> AsyncIterator[None]:
    """Each test begins without adapters."""
    yield
    for name in await loaded(client):
        (await client.unload_lora(name)).only(Adapters)


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    return load(llama)


def load(path: Path) -> Any:  # noqa: ANN401
    loaders = cast("Any", transformers.AutoModelForCausalLM)
    return loaders.from_pretrained(path, dtype=torch.float32).eval()


async def loaded(client: RolloutClient) -> dict[str, int]:
    return (await client.server_info()).only(ServerFacts).adapters


@pytest.mark.shows(
    "load_lora_adapter_from_tensors",
    "lora_request",
    "enable_lora",
    "max_loras_per_batch",
    "weight_sync_method: lora",
)
async def test_rollouts_with_each_adapter_and_without_run_in_one_batch(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    adapters = {
        "all": random_lora(model, 1, scale=SCALE),
        "some": random_lora(model, 2, rank=MAX_RANK, targets=["k_proj", "up_proj"], scale=SCALE),
    }
    await lora_steps.adapters_run_side_by_side(client, model, adapters, N_EACH)


async def test_an_adapter_that_overflows_ends_its_own_rollouts(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    sound = random_lora(model, 51, scale=SCALE)
    huge = {name: each * 1e30 for name, each in sound.tensors.items()}
    await publish(client, "huge", dataclasses.replace(sound, tensors=huge))

    asked = [
        client.generate(PROMPT, SAMPLING, lora=name, deadline_s=DEADLINE_S)
        for name in ["huge", ""] * N_EACH
    ]
    ended = await asyncio.gather(*asked, return_exceptions=True)

    for broken, plain in zip(ended[::2], ended[1::2], strict=True):
        assert isinstance(broken, EngineFailed)
        assert (broken.code, broken.field) == ("broken_weights", "lora")
        assert isinstance(plain, Rollout)
    assert (await client.status()).troubled == {}


@pytest.mark.shows("lora_name")
async def test_a_new_version_serves_new_rollouts_and_leaves_the_others_alone(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    swap = Swap(*(random_lora(model, seed, scale=SCALE) for seed in (11, 12, 13)))
    await lora_steps.a_new_version_leaves_the_others_alone(client, model, swap)


@pytest.mark.shows("unload_lora_adapter")
async def test_an_adapter_that_was_unloaded_in_use_serves_its_rollout_to_the_end_and_no_other(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 21, scale=SCALE)
    await publish(client, "leaving", lora)
    running = Streamed(client, PROMPT, LONG, lora="leaving")
    await running.reached(N_BEFORE)

    left = (await client.unload_lora("leaving")).only(Adapters)
    await running.grown_by(N_BEFORE)

    assert "leaving" not in left.adapters
    with pytest.raises(Refused, match="leaving is not loaded"):
        await client.generate(PROMPT, SAMPLING, lora="leaving", deadline_s=DEADLINE_S)
    assert_from(lora.merged(model), PROMPT, await running.cut())


@pytest.mark.shows("pinned")
async def test_no_adapter_makes_room_for_another_unasked(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 31, scale=SCALE)
    for number in range(ROOM):
        await publish(client, f"n{number}", lora)

    with pytest.raises(RequestError, match="max_loaded_loras"):
        await WeightPublisher(client).publish_lora("more", lora.tensors, alpha=lora.alpha)

    assert set(await loaded(client)) == {f"n{number}" for number in range(ROOM)}
    rollout = await client.generate(PROMPT, SAMPLING, lora="n0", deadline_s=DEADLINE_S)
    assert_from(lora.merged(model), PROMPT, rollout)


@pytest.mark.shows("load_lora_adapter", "lora_path")
async def test_an_adapter_comes_from_files_below_the_operators_directory(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    told = (await client.load_lora("filed", 7, path="in_files")).only(Adapters)
    rollout = await client.generate(PROMPT, SAMPLING, lora="filed@7", deadline_s=DEADLINE_S)

    assert told.adapters["filed"] == 7
    assert_from(random_lora(model, 41, scale=SCALE).merged(model), PROMPT, rollout)
    with pytest.raises(FleetCommandFailed, match="'nowhere' has no"):
        await client.load_lora("missing", 1, path="nowhere")


@pytest.mark.shows("lora_refusals", "max_lora_rank")
async def test_an_adapter_that_the_engine_cannot_take_is_refused_and_the_engine_lives(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    publisher = WeightPublisher(client)
    wide = random_lora(model, 51, rank=2 * MAX_RANK)
    head = random_lora(model, 52, targets=["lm_head"])
    good = random_lora(model, 53, scale=SCALE)
    foreign = {name.replace("layers.1", "layers.9"): each for name, each in good.tensors.items()}

    with pytest.raises(RequestError, match="max_lora_rank"):
        await publisher.publish_lora("bad", wide.tensors, alpha=wide.alpha)
    with pytest.raises(RequestError, match="lora-target-modules"):
        await publisher.publish_lora("bad", head.tensors, alpha=head.alpha)
    with pytest.raises(RequestError, match="no linear module"):
        await publisher.publish_lora("bad", foreign, alpha=good.alpha)

    await publish(client, "bad", good)
    rollout = await client.generate(PROMPT, SAMPLING, lora="bad", deadline_s=DEADLINE_S)
    assert_from(good.merged(model), PROMPT, rollout)


async def test_new_weights_keep_the_adapters(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    lora = random_lora(model, 61, scale=SCALE)
    await publish(client, "kept", lora)
    changed = random_lora(model, 62, scale=0.1).merged(model)
    weights = WeightPublisher(client)

    await weights.publish(changed.named_parameters(), require="all")
    with_it = await client.generate(PROMPT, SAMPLING, lora="kept", deadline_s=DEADLINE_S)
    without = await client.generate(PROMPT, SAMPLING, deadline_s=DEADLINE_S)
    await weights.publish(model.named_parameters(), require="all")

    assert_from(lora.merged(changed), PROMPT, with_it)
    assert_from(changed, PROMPT, without)


@pytest.mark.shows("score")
async def test_scores_are_the_softmax_of_a_plain_forward_pass(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
) -> None:
    query, items, labels = [5, 6], [[10 + i, 7] for i in range(12)], [20, 21, 22, 20]
    likely = await client.score(query, items, labels)
    logs = await client.score(query, items, labels, apply_softmax=False, item_first=True)

    expected = logprobs(model, [[*query, *item] for item in items])[:, labels]
    shares = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    assert np.abs(likely.scores - shares).max() < TOLERANCE
    assert likely.n_prompt_tokens == 4 * len(items)
    turned = logprobs(model, [[*item, *query] for item in items])[:, labels]
    assert np.abs(logs.scores - turned).max() < TOLERANCE


async def test_scores_come_while_rollouts_run(client: RolloutClient) -> None:
    running = [Streamed(client, PROMPT, LONG) for _ in range(N_EACH)]
    for each in running:
        await each.reached(N_BEFORE)

    scored = await client.score(PROMPT, [[i] for i in range(3, 67)], [20, 21])

    assert scored.scores.shape == (64, 2)
    for each in running:
        await each.grown_by(N_BEFORE)
        await each.cut()


@pytest.mark.shows("supports_embeddings")
async def test_a_model_that_generates_neither_embeds_nor_ranks(client: RolloutClient) -> None:
    with pytest.raises(EngineFailed, match="is_embedding"):
        await client.embed([PROMPT])
    with pytest.raises(EngineFailed, match="cross-encoder"):
        await client.rerank([("a query", "a text")])
    with pytest.raises(RequestError, match="at least one"):
        await client.score(PROMPT, [PROMPT], [])


@torch.no_grad()
def logprobs(model: Any, texts: Sequence[Sequence[int]]) -> Float32s:  # noqa: ANN401
    logits = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
    return torch.log_softmax(logits.float(), -1).numpy()
