"""One rank of a trainer that holds models together with others; says what it saw as JSON.

python -m tests.integration.shard_rank FOLDER RANK SEED

Rank 0 starts a store and publishes one case after another; `digests` are those of the manifest.
"""

# pyright: reportUnknownMemberType=false
# The stubs of torch.distributed leave parameters untyped.

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rolloutbus.bus.wire.errors import BusError, PeerLost
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.sharded import ShardedSource
from rolloutbus.trainer_adapter.publisher.tensor_source import SourceTensor
from tests.integration.live_fleet import START_S
from tests.integration.store_harness import StoreHarness, store_harness

MIB = 1 << 20
BUCKET_BYTES = 16 * MIB
WORLD = 2
CASES = ("fsdp", "cast", "stages", "columns", "refused", "large")
Seen = dict[str, dict[str, Any]]


def small_model(seed: int) -> torch.nn.Sequential:
    """Shards of unequal size, a scale too small to be shared, tied weights, two dtypes."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 33), torch.nn.Linear(33, 7, bias=False), torch.nn.LayerNorm(1)
    )
    model.append(torch.nn.Linear(7, 33))
    model[3].weight = model[0].weight
    return model


def large_model(seed: int) -> torch.nn.Sequential:
    """128 MiB, a tensor being a quarter of a bucket."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024, bias=False) for _ in range(128 * MIB // (4 * MIB)))
    )


def fsdp(model: torch.nn.Sequential) -> torch.nn.Sequential:
    """The same model, each parameter sharded over all ranks."""
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model, mesh=mesh)
    return model


def stages(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Pipeline stages: each rank has its own layers, and calls the first of them 0."""
    model = small_model(seed)
    layers = (0, 1) if rank == 0 else (2, 3)
    return {
        f"{i - layers[0]}.{name}": each.detach()
        for i in layers
        for name, each in model[i].named_parameters()
    }


def columns(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensor parallel by hand: matrices are cut along their columns, vectors are whole."""
    return {
        name: each.detach().tensor_split(WORLD, dim=1)[rank].contiguous()
        if each.dim() > 1
        else each.detach()
        for name, each in small_model(seed).named_parameters()
    }


def join(_name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), dim=1) if parts[0].dim() > 1 else parts[0]


def source_of(case: str, rank: int, seed: int) -> ShardedSource:
    match case:
        case "fsdp" | "refused":
            return ShardedSource(fsdp(small_model(seed)), bucket_bytes=1024)
        case "cast":
            return ShardedSource(fsdp(small_model(seed)), dtype=torch.bfloat16)
        case "large":
            return ShardedSource(fsdp(large_model(seed)), bucket_bytes=BUCKET_BYTES)
        case "stages":
            shift = 0 if rank == 0 else 2
            return ShardedSource(
                stages(rank, seed), rename=lambda name: f"{int(name[0]) + shift}{name[1:]}"
            )
        case "columns":
            return ShardedSource(columns(rank, seed), merge=join)
        case _:
            raise AssertionError(case)


async def publish_all(folder: Path, seed: int) -> Seen:
    """What rank 0 does."""
    seen: Seen = {}
    async with store_harness(folder) as harness:
        for case in CASES:
            # In a thread: it waits for the other rank, and the store wants its heartbeats answered.
            source = await asyncio.to_thread(source_of, case, 0, seed)
            seen[case] = await publish(harness, source, case)
        source = await asyncio.to_thread(source_of, "fsdp", 0, seed)
        seen["lost"] = await publish_alone(harness, source)
    return seen


async def publish_alone(harness: StoreHarness, source: ShardedSource) -> dict[str, Any]:
    """The other rank has ended meanwhile."""
    try:
        await WeightPublisher(harness).publish(source, deadline_s=START_S)
    except PeerLost as error:
        return {"error": str(error), "outcome": error.outcome}
    return {}


async def publish(harness: StoreHarness, source: ShardedSource, case: str) -> dict[str, Any]:
    publisher = WeightPublisher(harness)
    if case == "refused":
        try:
            await publisher.publish(source, require="most", deadline_s=START_S)
        except BusError as error:
            return {"error": str(error)}
    # The first time brings in code and buffers that stay.
    await publisher.publish(source, deadline_s=START_S)
    before = start_peak()
    published = await publisher.publish(source, deadline_s=START_S)
    peak = status_bytes("VmHWM") - before - mapped_bytes(source.tensors)
    digests = await harness.digests_kept(published.version)
    gathered = source.peak_bytes
    return {"digests": digests, "peak_bytes": peak, "gathered_bytes": gathered}


def mapped_bytes(tensors: Sequence[SourceTensor]) -> int:
    """Of the store's segment, whose pages count as this process's once it has written them."""
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors)


def start_peak() -> int:
    """Begin a new peak; memory held now, bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def assist_all(rank: int, seed: int) -> Seen:
    """What the other ranks do."""
    seen = {case: assist(source_of(case, rank, seed)) for case in CASES}
    source_of("fsdp", rank, seed)
    return seen


def assist(source: ShardedSource) -> dict[str, Any]:
    try:
        source.assist()
    except BusError as error:
        return {"error": str(error)}
    before = start_peak()
    source.assist()
    peak = status_bytes("VmHWM") - before
    return {"peak_bytes": peak, "gathered_bytes": source.peak_bytes}


def main() -> None:
    folder, rank, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=WORLD
    )
    seen = assist_all(rank, seed) if rank else asyncio.run(publish_all(folder, seed))
    print(json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
