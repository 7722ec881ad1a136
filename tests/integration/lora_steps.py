"""What rollouts with adapters owe a trainer, whatever engine samples them."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.errors import Refused
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, START_S, Streamed
from tests.lora_adapters import Lora, assert_from

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = SamplingParams(max_new_tokens=32, temperature=1.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
N_BEFORE = 30


class Swap(NamedTuple):
    """An adapter, what replaces it, and one that stays."""

    old: Lora
    new: Lora
    other: Lora


async def publish(client: RolloutClient, name: str, lora: Lora) -> int:
    """Bring it to every worker; its version."""
    published = await WeightPublisher(client).publish_lora(name, lora.tensors, alpha=lora.alpha)
    assert {*published.workers} == {each.name for each in (await client.status()).workers}
    return published.version


async def adapters_run_side_by_side(
    client: RolloutClient,
    model: Any,  # noqa: ANN401 - transformers is untyped
    adapters: Mapping[str, Lora],
    n_each: int,
) -> None:
    for name, lora in adapters.items():
        await publish(client, name, lora)
    loras = ["", *adapters] * n_each

    rollouts = await asyncio.gather(
        *(client.generate(PROMPT, SAMPLING, lora=lora, deadline_s=DEADLINE_S) for lora in loras)
    )

    truths = {"": model} | {name: lora.merged(model) for name, lora in adapters.items()}
    for lora, rollout in zip(loras, rollouts, strict=True):
        assert_from(truths[lora], PROMPT, rollout)


async def a_new_version_leaves_the_others_alone(
    client: RolloutClient,
    model: Any,  # noqa: ANN401
    swap: Swap,
) -> None:
    first = await publish(client, "swapped", swap.old)
    await publish(client, "other", swap.other)
    on_old = Streamed(client, PROMPT, LONG, lora="swapped", deadline_s=START_S)
    on_other = Streamed(client, PROMPT, LONG, lora="other", deadline_s=START_S)
    await on_old.reached(N_BEFORE)
    await on_other.reached(N_BEFORE)

    second = await publish(client, "swapped", swap.new)
    await on_old.grown_by(N_BEFORE)
    await on_other.grown_by(N_BEFORE)
    after = await client.generate(PROMPT, SAMPLING, lora=f"swapped@{second}", deadline_s=DEADLINE_S)

    by_name = await client.generate(PROMPT, SAMPLING, lora="swapped", deadline_s=DEADLINE_S)
    before = await on_old.cut()

    assert (before.lora, after.lora) == (f"swapped@{first}", f"swapped@{second}")
    assert by_name.lora == after.lora
    assert_from(swap.old.merged(model), PROMPT, before)
    assert_from(swap.other.merged(model), PROMPT, await on_other.cut())
    assert_from(swap.new.merged(model), PROMPT, after)
    with pytest.raises(Refused, match=f"swapped@{first} is not loaded") as caught:
        await client.generate(PROMPT, SAMPLING, lora=f"swapped@{first}", deadline_s=DEADLINE_S)
    assert caught.value.field == "lora"
