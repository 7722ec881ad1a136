"""How fast do weights reach an engine on a GPU, and for how long does it stand still?

A trainer (this process, on the first GPU) publishes a bfloat16 model of random weights to a
worker that generates all the while: by `cuda_ipc` on the same GPU, and by `collective`
with nccl on the second one. In the same run: what the hardware does by itself, a copy of the same
bytes within the GPU and from one GPU to the other.

    python benchmarks/gpu/weights.py --json
"""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import rolloutbus
from benchmarks.open_requests import open_requests
from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from rolloutbus.trainer_adapter.publisher.cuda_ipc import BUCKET_BYTES
from rolloutbus.trainer_adapter.publisher.offering import checksums_of, fill, spans_of
from rolloutbus.trainer_adapter.publisher.tensor_source import DTYPE_NAMES

WAYS = ("cuda_ipc", "collective", "shm")
DEADLINE_S = 300.0
OPEN_REQUESTS = 4

EngineKind = Literal["transformers", "sglang"]
_ANY_ENGINE: dict[str, object] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "slots": 8,
    "max_context": 512,
}
OPTIONS: dict[EngineKind, dict[str, object]] = {
    "transformers": {**_ANY_ENGINE, "kv_tokens": 4096},
    "sglang": {
        **_ANY_ENGINE,
        "arguments": {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.4,
            "max_total_tokens": 8192,
            "cuda_graph_max_bs_decode": 8,
            "disable_prefill_cuda_graph": True,
        },
    },
}

Weights = dict[str, torch.Tensor]


def build_model(directory: Path, layers: int, *, has_files: bool = True) -> Weights:
    """Makes a Llama with the layer shapes of a 7B model; returns its weights, on the first GPU.

    Without files the directory has its configuration alone: an engine makes up weights sooner than
    it reads them.
    """
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    transformers_logging.disable_progress_bar()
    if has_files:
        model.save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    return {name: each.detach() for name, each in model.named_parameters()}


def copy_s(weights: Weights, device: str, rounds: int) -> float:
    """Seconds of one copy of all bytes to memory of `device` that is there already; median."""
    targets = [torch.empty_like(each, device=device) for each in weights.values()]
    found: list[float] = []
    for _ in range(rounds + 1):
        _synchronize()
        began = time.perf_counter()
        for source, target in zip(weights.values(), targets, strict=True):
            target.copy_(source)
        _synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def offer_s(weights: Weights, rounds: int) -> dict[str, float]:
    """Seconds of filling the buckets, and of their checksums; medians."""
    layout = lay_out((n, DTYPE_NAMES[w.dtype], tuple(w.shape)) for n, w in weights.items())
    spans = list(spans_of(layout, BUCKET_BYTES))
    pieces = [torch.empty(each.size_bytes, dtype=torch.uint8, device="cuda:0") for each in spans]
    filling: list[float] = []
    summing: list[float] = []
    for _ in range(rounds + 1):
        _synchronize()
        began = time.perf_counter()
        for span, piece in zip(spans, pieces, strict=True):
            fill(piece, span, layout, list(weights.values()))
        _synchronize()
        filled = time.perf_counter()
        checksums_of(pieces)
        filling.append(filled - began)
        summing.append(time.perf_counter() - filled)
    return {"fill": statistics.median(filling[1:]), "sum": statistics.median(summing[1:])}


async def updates(
    way: str, engine: EngineKind, model: Path, weights: Weights, rounds: int
) -> dict[str, list[float]]:
    """Seconds of writing, updating and standing still, of each round but the first."""
    found: dict[str, list[float]] = {"write": [], "update": [], "stall": []}
    with _only_gpu(1 if way == "collective" else 0):
        up = rolloutbus.up(model=model, workers=1, engine=engine, engine_options=OPTIONS[engine])
        fleet = await up.__aenter__()
    try:
        async with rolloutbus.connect(fleet.address, name="trainer") as client:
            publisher = rolloutbus.WeightPublisher(client)
            publisher.offer("collective", CollectiveOffering("nccl", bucket_bytes=BUCKET_BYTES))
            async with open_requests(client, OPEN_REQUESTS, DEADLINE_S):
                for number in range(rounds + 1):
                    published = await publisher.publish(
                        weights,
                        transport=cast("Literal['cuda_ipc', 'collective', 'shm']", way),
                        require="all",
                        deadline_s=DEADLINE_S,
                    )
                    taken = set(published.transport.values())
                    if taken != {way}:
                        raise SystemExit(f"{way} was not taken: {taken} {published.why}")
                    if number:
                        found["write"].append(published.write_s)
                        found["update"].append(published.update_s)
                        found["stall"] += [ms / 1e3 for ms in published.stall_ms.values()]
                    _say(f"{way}: round {number} of {rounds}")
            publisher.forget()
    finally:
        await up.__aexit__(None, None, None)
    return found


@contextlib.contextmanager
def _only_gpu(index: int) -> Generator[None]:
    """Processes that are started meanwhile see one GPU; this one has seen them all before."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The hardware first, then way by way."""
    model = folder / "model"
    weights = build_model(model, options.layers)
    size = sum(each.nbytes for each in weights.values())
    n_gpus = torch.cuda.device_count()
    _say(f"{size / 1e9:.1f} GB of weights, {n_gpus} GPUs")
    copies = {"cuda_ipc": copy_s(weights, "cuda:0", options.rounds)}
    if n_gpus > 1:
        copies["collective"] = copy_s(weights, "cuda:1", options.rounds)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "engine": options.engine,
        "model_gb": round(size / 1e9, 2),
        "offer_gb_per_s": {
            name: round(size / seconds / 1e9, 1)
            for name, seconds in offer_s(weights, options.rounds).items()
        },
    }
    torch.cuda.empty_cache()
    for way in options.ways:
        if way == "collective" and n_gpus == 1:
            _say("collective: there is one GPU only")
            continue
        found = asyncio.run(updates(way, options.engine, model, weights, options.rounds))
        copy = copies.get(way, copies["cuda_ipc"])
        report[way] = _row(found, size, copy)
        _say(f"{way}: {report[way]}")
    return report


def _row(found: dict[str, list[float]], size_bytes: int, copy: float) -> dict[str, float]:
    update = statistics.median(found["update"])
    return {
        "update_ms": round(update * 1e3, 1),
        "gb_per_s": round(size_bytes / update / 1e9, 1),
        "copy_gb_per_s": round(size_bytes / copy / 1e9, 1),
        "to_copy": round(copy / update, 3),
        "stall_p50_ms": round(statistics.median(found["stall"]) * 1e3, 2),
        "stall_max_ms": round(max(found["stall"]) * 1e3, 2),
        "stall_p50_to_copy": round(statistics.median(found["stall"]) / copy, 2),
        "write_gb_per_s": round(size_bytes / statistics.median(found["write"]) / 1e9, 2),
    }


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Weight transports between GPUs")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--layers", type=int, default=6, help="6 layers are 2.9 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=OPTIONS, default="transformers")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        report = measure(options, Path(folder))
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
