"""A worker on a GPU samples with exactly the weights that a trainer on a GPU published."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.integration.reference import Reference
from tests.line_process import DEADLINE_S

pytestmark = pytest.mark.timeout(400)

PROMPT = [5, 6, 7, 8]
SAMPLING = SamplingParams(max_new_tokens=48, ignore_eos=True)
TOLERANCE = 2e-3
"""Between a GPU's and a CPU's float32; other weights are off by a hundred times as much."""
ENGINE: dict[str, object] = {"device": "cuda", "slots": 4, "kv_tokens": 4096, "max_context": 512}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


async def assert_truth(
    client: RolloutClient, publisher: WeightPublisher, reference: Reference, transport: str
) -> None:
    """Three versions by that transport, which `auto` or the caller's wish leads to."""
    wish = "auto" if transport == "cuda_ipc" else "collective"
    for step in range(3):
        reference.perturb(seed=step)
        on_gpu = {name: each.cuda() for name, each in reference.model.named_parameters()}
        published = await publisher.publish(
            on_gpu, transport=wish, require="all", deadline_s=DEADLINE_S
        )
        reference.keep(published.version)
        assert set(published.transport.values()) == {transport}, published.why
        rollout = await client.generate(PROMPT, SAMPLING, versions="latest", deadline_s=DEADLINE_S)
        assert {int(each) for each in rollout.token_versions} == {published.version}
        truth = reference.fresh(PROMPT, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
    publisher.forget()


@pytest.mark.shows("CUDA IPC")
async def test_over_cuda_ipc(model: Path, tmp_path: Path) -> None:
    up = rolloutbus.up(
        model=model, workers=1, engine="transformers", engine_options=ENGINE, run_dir=tmp_path / "r"
    )
    async with up as fleet, rolloutbus.connect(fleet.address, name="trainer") as client:
        await assert_truth(client, WeightPublisher(client), Reference(model), "cuda_ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.usefixtures("second_gpu")
async def test_over_nccl(model: Path, tmp_path: Path) -> None:
    up = rolloutbus.up(
        model=model, workers=1, engine="transformers", engine_options=ENGINE, run_dir=tmp_path / "r"
    )
    async with up as fleet, rolloutbus.connect(fleet.address, name="trainer") as client:
        publisher = WeightPublisher(client)
        publisher.offer("collective", CollectiveOffering("nccl"))
        await assert_truth(client, publisher, Reference(model), "collective")
