"""A tensor that takes several ranges is never put together from two versions."""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rolloutbus
from rolloutbus import RolloutClient, WeightPublisher
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.trainer_adapter.client.weight_queries import ActiveTensor
from tests.integration.live_fleet import DEADLINE_S, PATIENT, STEADY_HOST

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAME = "model.embed_tokens.weight"
N_VERSIONS = 4


def large_model() -> LlamaForCausalLM:
    """An embedding of 10 MiB and little else."""
    config = LlamaConfig(
        vocab_size=81_920,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


async def fetch_until(client: RolloutClient, is_over: asyncio.Event) -> list[ActiveTensor]:
    found = [await client.get_weights(NAME, "w0", deadline_s=DEADLINE_S)]
    while not is_over.is_set():
        found.append(await client.get_weights(NAME, "w0", deadline_s=DEADLINE_S))
    return found


async def test_a_tensor_is_of_one_version_while_versions_change(tmp_path: Path) -> None:
    model = large_model()
    model.save_pretrained(tmp_path)
    embedding = dict(model.named_parameters())[NAME]
    held: dict[int, np.ndarray] = {0: embedding.detach().numpy().copy()}
    assert held[0].nbytes > 2 * CHUNK_BYTES
    is_over = asyncio.Event()
    async with (
        rolloutbus.up(
            model=tmp_path,
            workers=1,
            engine_options={"threads": 1},
            lease=PATIENT,
            host=STEADY_HOST,
        ) as fleet,
        rolloutbus.connect(fleet.address) as client,
        asyncio.TaskGroup() as tasks,
    ):
        fetching = tasks.create_task(fetch_until(client, is_over))
        publisher = WeightPublisher(client)
        for _ in range(N_VERSIONS):
            with torch.no_grad():
                embedding.add_(1.0)
            published = await publisher.publish(model, require="all", deadline_s=DEADLINE_S)
            held[published.version] = embedding.detach().numpy().copy()
        is_over.set()
        found = await fetching
        report = await client.check_weights()
    for tensor in found:
        np.testing.assert_array_equal(tensor.array, held[tensor.version])
    assert report.is_ok
    assert report.by_worker["w0"].version == max(held)
