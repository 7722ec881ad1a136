"""The real SGLang on two GPUs: one engine over both, and weights by nccl from one to the other."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import asyncio
import shutil
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import torch as safetensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import rolloutbus
from rolloutbus import SamplingParams, ShardedSource, SyncWeightPublisher, WeightPublisher
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.trainer_adapter.client.client import ConnectOptions
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.gpu.gpu_fleets import gpu_fleet, running
from tests.gpu.permuting_model import PermutingModel, permutation
from tests.gpu.tiny import FAR, NEAR, error_of, load_tiny, save_tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

DEADLINE_S = 120.0
_safetensors = cast("Any", safetensors)  # its stubs leave parameters untyped
GREEDY = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
SAMPLING = SamplingParams(max_new_tokens=64, temperature=1.0, ignore_eos=True)
PROMPTS = [[20 + n, 40 + n] for n in range(16)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PermutingModel, Path]:
    model = PermutingModel()
    return model, model.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other tests may hold memory of one GPU, which SGLang takes for a mistake."""
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


async def assert_follows(client: rolloutbus.RolloutClient, seed: int) -> None:
    """Every token is what the weights of this seed make of the one before."""
    rollouts = await asyncio.gather(
        *[client.generate(each, GREEDY, deadline_s=DEADLINE_S) for each in PROMPTS]
    )
    following = permutation(seed)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        before = np.concatenate([[prompt[-1]], rollout.tokens[:-1]])
        assert np.array_equal(rollout.tokens, following[before])


@pytest.mark.shows(
    "tensor parallel updates", "inference_engine_tensor_parallel_size", "gpu_memory_utilization"
)
@pytest.mark.parametrize("kind", ["tp", "dp", "pp"])
async def test_one_engine_over_both_takes_new_weights(
    model: tuple[PermutingModel, Path], kind: str
) -> None:
    weights, folder = model
    split: dict[str, Any] = {f"{kind}_size": 2}
    async with running(gpu_fleet(folder, **split)) as client:
        facts = (await client.server_info()).by_worker["w0"]
        assert isinstance(facts, ServerFacts)
        assert facts.parallel == {"tp": 1, "pp": 1, "dp": 1, "ep": 1} | {kind: 2}
        await assert_follows(client, 0)
        publisher = WeightPublisher(client)
        for seed in (1, 2):
            weights.become(seed)
            published = await publisher.publish(
                weights.weights(), require="all", deadline_s=DEADLINE_S
            )
            print(kind, "= 2:", published.transport, published.stall_ms)
            await assert_follows(client, seed)
        publisher.forget()
    weights.become(0)


def publish_shards(rank: int, options: ConnectOptions, seed: int, ranks: Path) -> None:
    """What one rank of a trainer does whose model lies on both GPUs."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{ranks}", rank=rank, world_size=2, device_id=device
    )
    weights = PermutingModel()
    weights.become(seed)
    fully_shard(weights.model, mesh=init_device_mesh("cuda", (2,)))
    shards = ShardedSource(weights.model)
    if rank == 0:
        with rolloutbus.connect_sync(**options) as client:
            SyncWeightPublisher(client).publish(shards, require="all", deadline_s=DEADLINE_S)
    else:
        shards.assist()
    dist.destroy_process_group()


async def test_shards_on_both_go_to_one_engine_over_both(
    model: tuple[PermutingModel, Path], tmp_path: Path
) -> None:
    _, folder = model
    async with running(gpu_fleet(folder, tp_size=2)) as client:
        for seed in (1, 2):
            arguments = (client.connect_options, seed, tmp_path / f"ranks-{seed}")
            await asyncio.to_thread(spawn, publish_shards, arguments, nprocs=2)
            await assert_follows(client, seed)


@pytest.mark.shows("inference_engine_expert_parallel_size", "moe_runner_backend", "moe_a2a_backend")
async def test_experts_over_both_take_new_weights(tmp_path: Path) -> None:
    folder = save_tiny("experts", tmp_path / "first")
    prompts = [[3 + (5 * row + i) % 500 for i in range(4 + 9 * row)] for row in range(16)]
    options = gpu_fleet(
        folder, tp_size=2, ep_size=2, moe_runner_backend="triton", moe_a2a_backend="none"
    )
    async with running(options) as client:
        assert (await client.facts()).ep_size == 2
        publisher = WeightPublisher(client)
        for seed in (0, 1, 2):
            if seed:
                folder = shutil.copytree(folder, tmp_path / str(seed))
                tensors = changed(folder / "model.safetensors", seed)
                await publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
            truth = load_tiny(folder)
            rollouts = await asyncio.gather(
                *[client.generate(each, SAMPLING, deadline_s=DEADLINE_S) for each in prompts]
            )
            errors = [error_of(truth, *each) for each in zip(prompts, rollouts, strict=True)]
            print("ep = 2:", max(errors), sum(errors) / len(errors))
            # An expert that bfloat16 changes moves one rollout by more than it moves their mean.
            assert max(errors) < FAR
            assert sum(errors) / len(errors) < NEAR
        publisher.forget()


def changed(file: Path, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, each changed a little, there as well."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: each + 0.02 * torch.randn(each.shape, generator=generator).to(each.dtype)
        for name, each in _safetensors.load_file(file).items()
    }
    _safetensors.save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.shows("init_weight_update_communicator", "weight_sync_backend: nccl", "CUDA IPC")
@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("way", ["collective", "cuda_ipc"])
async def test_weights_come_from_another_gpu(
    model: tuple[PermutingModel, Path], way: Literal["collective", "cuda_ipc"]
) -> None:
    weights, folder = model
    async with running(gpu_fleet(folder)) as client:
        publisher = WeightPublisher(client)
        publisher.offer("collective", CollectiveOffering("nccl"))
        for seed in (1, 2):
            weights.become(seed)
            published = await publisher.publish(
                weights.weights(), transport=way, require="all", deadline_s=DEADLINE_S
            )
            print(published.transport, published.stall_ms)
            assert set(published.transport.values()) == {way}, published.why
            await assert_follows(client, seed)
        publisher.forget()
    weights.become(0)
