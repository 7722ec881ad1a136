"""One broadcast over nccl between processes that do nothing else: what the links allow."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The stubs of torch leave parameters untyped.

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.trainer_adapter.publisher.collective import BUCKET_BYTES
from rolloutbus.trainer_adapter.publisher.offering import spans_of
from rolloutbus.trainer_adapter.publisher.tensor_source import DTYPE_NAMES


def raw_broadcast_s(
    weights: Mapping[str, torch.Tensor], rounds: int, folder: Path
) -> tuple[float, float]:
    """Seconds of one broadcast to all other GPUs until the last has it: median, and the first.

    In the buckets that these weights are published in. The first makes the links.
    """
    layout = lay_out((n, DTYPE_NAMES[w.dtype], tuple(w.shape)) for n, w in weights.items())
    sizes = [each.size_bytes for each in spans_of(layout, BUCKET_BYTES)]
    meeting, world = folder / "meeting", torch.cuda.device_count()
    cast("Any", torch.multiprocessing).spawn(  # untyped
        _take_part, (world, meeting, sizes, rounds), nprocs=world
    )
    first, *others = json.loads(_answer(meeting).read_text())
    return statistics.median(others), first


def _answer(meeting: Path) -> Path:
    return meeting.with_suffix(".json")


def _take_part(rank: int, world: int, meeting: Path, sizes: list[int], rounds: int) -> None:
    """One process; rank 0 writes down seconds of each round."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
    pieces = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    found: list[float] = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        works = [dist.broadcast(each, 0, async_op=True) for each in pieces]
        for work in works:
            if work is not None:
                work.wait()
        dist.barrier()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    if rank == 0:
        _answer(meeting).write_text(json.dumps(found))
    dist.destroy_process_group()
