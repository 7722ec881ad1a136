"""How well texts fit, and classes of texts: the real SGLang against a plain forward pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

import rolloutbus
from rolloutbus.errors import EngineFailed, RequestError
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.reading_models import (
    N_CLASSES,
    pair_tokenizer,
    save_classifier,
    save_cross_encoder,
)

pytestmark = pytest.mark.asyncio(loop_scope="function")

TOLERANCE = 1e-4
QUERIES = ["red", "what is the colour of the sky on a clear day?", "a"]
TEXTS = ["blue", "The sky is blue.", "x" * 90, "?"]
PAIRS = [(query, text) for query in QUERIES for text in TEXTS]
QUERY, ITEMS = [5, 6, 7], [[10], [11, 12, 13], [14] * 300, [5, 6, 7]]


@torch.no_grad()
def ranks_of(path: Path, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    loaders = cast("Any", transformers.AutoModelForSequenceClassification)
    model, tokenizer = loaders.from_pretrained(path, dtype=torch.float32).eval(), pair_tokenizer()
    inputs = [tokenizer(*pair, return_tensors="pt") for pair in pairs]
    return np.array([float(model(**each).logits[0, 0]) for each in inputs], np.float32)


@torch.no_grad()
def classes_of(path: Path, texts: Sequence[Sequence[int]]) -> np.ndarray:
    loaders = cast("Any", transformers.AutoModelForSequenceClassification)
    model = loaders.from_pretrained(path, dtype=torch.float32).eval()
    return np.stack([model(torch.tensor([text])).logits[0].numpy() for text in texts])


@pytest.mark.shows("rerank", "gpu_memory_utilization", "mem_fraction_static")
async def test_ranks_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    path = save_cross_encoder(tmp_path / "model")
    # Without chunks SGLang takes a share for its cache that is for larger machines.
    options = fleet_of(path, text=True, is_embedding=True, mem_fraction_static=0.5)
    assert "engine_options" in options
    arguments: Any = options["engine_options"]["arguments"]
    del arguments["chunked_prefill_size"]  # the worker itself must see to it
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="ranks", router=fleet.address, overtime_s=DEADLINE_S)
        async with rolloutbus.RolloutClient(settings) as client:
            together = await client.rerank(PAIRS)
            alone = [(await client.rerank([pair])).tolist()[0] for pair in PAIRS[:2]]
            with pytest.raises(EngineFailed, match="is_embedding"):
                await client.embed([QUERY])

    truth = ranks_of(path, PAIRS)
    print(together, truth)
    assert np.ptp(truth) > 100 * TOLERANCE, "the pairs differ"
    assert np.abs(np.array(together) - truth).max() < TOLERANCE
    assert np.abs(np.array(alone) - truth[:2]).max() < TOLERANCE


@pytest.mark.shows("score of reward models")
async def test_classes_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "model")
    async with rolloutbus.up(**fleet_of(path, is_embedding=True)) as fleet:
        settings = ClientSettings(name="classes", router=fleet.address, overtime_s=DEADLINE_S)
        async with rolloutbus.RolloutClient(settings) as client:
            logits = await client.score(QUERY, ITEMS, apply_softmax=False)
            turned = await client.score(QUERY, ITEMS, item_first=True)
            with pytest.raises(RequestError):
                await client.generate(QUERY, rolloutbus.SamplingParams(max_new_tokens=1))

    assert logits.scores.shape == (len(ITEMS), N_CLASSES)
    truth = classes_of(path, [[*QUERY, *item] for item in ITEMS])
    assert np.abs(logits.scores - truth).max() < TOLERANCE
    other = classes_of(path, [[*item, *QUERY] for item in ITEMS])
    shares = np.exp(other) / np.exp(other).sum(1, keepdims=True)
    assert np.abs(turned.scores - shares).max() < TOLERANCE
