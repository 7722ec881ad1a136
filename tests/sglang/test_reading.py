"""Models that read: vectors of the real SGLang, and what it must never be asked by mistake."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
import transformers

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.errors import EngineFailed, RequestError
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.gateway_process import gateway
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
DIMENSIONS = [16, 32]
"""Beginnings of a vector that serve as one."""
TEXTS = [[5, 6, 7, 8, 9], [10], [11, 12] * 400, [5, 6, 7, 8, 10]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(llama: Path) -> AsyncIterator[Fleet]:
    made_for = json.dumps({"is_matryoshka": True, "matryoshka_dimensions": DIMENSIONS})
    options = fleet_of(llama, is_embedding=True, json_model_override_args=made_for)
    async with rolloutbus.up(**options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    settings = ClientSettings(name="reader", router=fleet.address, overtime_s=DEADLINE_S)
    async with RolloutClient(settings) as connected:
        yield connected


@pytest.mark.shows("encode", "encode_single", "async_encode", "compute_similarity")
async def test_a_vector_is_the_normalised_last_state_of_a_plain_forward_pass(
    client: RolloutClient, llama: Path
) -> None:
    embedded = await client.embed(TEXTS)

    loaders = cast("Any", transformers.AutoModel)
    model = loaders.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [model(torch.tensor([text])).last_hidden_state[0, -1] for text in TEXTS]
    expected = torch.nn.functional.normalize(torch.stack(states)).numpy()
    assert np.abs(embedded.rows - expected).max() < TOLERANCE
    assert embedded.n_prompt_tokens == sum(map(len, TEXTS))
    similarity = await client.compute_similarity(TEXTS[0], TEXTS[3])
    assert abs(similarity - float(expected[0] @ expected[3])) < TOLERANCE


@pytest.mark.shows("dimensions")
async def test_vectors_are_cut_to_the_dimensions_that_the_model_was_made_for(
    client: RolloutClient,
) -> None:
    with pytest.raises(RequestError, match="matryoshka"):
        await client.embed(TEXTS, dimensions=8)

    whole = (await client.embed(TEXTS)).rows
    assert whole.shape == (len(TEXTS), 64)
    for size in DIMENSIONS:
        lengths = np.linalg.norm(whole[:, :size], axis=1, keepdims=True)
        cut = (await client.embed(TEXTS, dimensions=size)).rows
        assert np.abs(cut - whole[:, :size] / lengths).max() < TOLERANCE
    similarity = await client.compute_similarity(TEXTS[0], TEXTS[3], dimensions=DIMENSIONS[0])
    first, _, _, other = (await client.embed(TEXTS, dimensions=DIMENSIONS[0])).rows
    assert abs(similarity - float(first @ other)) < TOLERANCE


async def test_openais_package_gets_vectors_over_http(
    fleet: Fleet, client: RolloutClient, llama: Path
) -> None:
    texts = ["hello", "good day"]
    tokenizer: Any = byte_tokenizer()
    ids: list[list[int]] = [tokenizer.encode(text) for text in texts]
    expected = (await client.embed(ids)).rows
    named = ("--served-model-name", "tiny", "--tool-format", "none", "--reasoning-format", "none")
    async with gateway("--address", fleet.address, "--tokenizer", str(llama), *named) as served:
        address: Any = {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**address) as user:
            for given in (texts, ids):  # its package asks for base64
                told = await user.embeddings.create(model="tiny", input=given)
                rows = np.array([each.embedding for each in told.data], np.float32)
                assert np.abs(rows - expected).max() < TOLERANCE
                assert told.usage.prompt_tokens == sum(map(len, ids))
            with pytest.raises(openai.BadRequestError, match="matryoshka") as refused:
                await user.embeddings.create(model="tiny", input="hello", dimensions=8)
            assert refused.value.param == "dimensions"
            with pytest.raises(openai.BadRequestError) as empty:
                await user.embeddings.create(model="tiny", input=["hello", ""])
            assert empty.value.param == "input[1]"

        def blocking() -> list[float]:
            with openai.OpenAI(**address) as user:
                told = user.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
            return told.data[0].embedding

        assert await asyncio.to_thread(blocking) == pytest.approx(
            expected[0].tolist(), abs=TOLERANCE
        )


async def test_a_model_that_reads_is_not_asked_to_write(client: RolloutClient) -> None:
    with pytest.raises(EngineFailed, match="reads only") as caught:
        await client.generate(TEXTS[0], SamplingParams(max_new_tokens=4), deadline_s=DEADLINE_S)
    assert caught.value.code == "unsupported"
    with pytest.raises(EngineFailed, match="generates or classifies"):
        await client.score(TEXTS[0], TEXTS, [5])

    assert (await client.embed(TEXTS)).rows.shape == (len(TEXTS), 64)


async def test_a_reader_can_be_paused_and_its_cache_flushed(client: RolloutClient) -> None:
    await client.embed(TEXTS)
    await client.pause("abort")
    await client.flush_cache()
    await client.resume()

    assert (await client.embed(TEXTS)).rows.shape == (len(TEXTS), 64)
