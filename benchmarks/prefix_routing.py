"""Measures the gain when requests go where the beginning of their prompt is cached.

Several long documents, each asked about many times in random order; the caches of all workers
together hold them all, that of one worker does not. Two fleets of real engines take turns with the
same requests: one tells the router what it has cached, the other does not. Caches are empty at the
start of each turn.

    python benchmarks/prefix_routing.py --json
"""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import rolloutbus
from benchmarks.side_processes import machine
from rolloutbus import RolloutClient, SamplingParams, Want
from rolloutbus.trainer_adapter.client.client import connect

GOAL = 1.2
"""Goal: requests per second, as a multiple of those of the fleet without prefix reports."""
VOCABULARY = 2048
N_OWN, N_NEW = 32, 8
"""Tokens of a question, and of its answer."""
SLOTS = 4
ANSWER = SamplingParams(max_new_tokens=N_NEW, temperature=0.0, ignore_eos=True)
CACHED = Want(cached_tokens=True)

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


def _model(directory: Path, max_context: int) -> None:
    """A float32 Llama of 4 million parameters; its prompts cost more than its answers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
    )
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(directory)


def _documents(options: argparse.Namespace) -> list[Tokens]:
    chance = np.random.default_rng(1)
    n_tokens: int = options.tokens
    return [chance.integers(3, VOCABULARY, n_tokens) for _ in range(options.documents)]


async def _turn(
    client: RolloutClient, documents: Sequence[Tokens], options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """All questions once, a bounded number at a time."""
    chance = np.random.default_rng(seed)
    n_requests: int = options.requests
    chosen: list[int] = chance.integers(0, len(documents), n_requests).tolist()
    questions = [
        np.concatenate([documents[n], chance.integers(3, VOCABULARY, N_OWN)]) for n in chosen
    ]
    await client.flush_cache()
    places = asyncio.Semaphore(options.at_once)
    n_cached = n_prompt = 0

    async def ask(prompt: Tokens) -> None:
        nonlocal n_cached, n_prompt
        async with places:
            rollout = await client.generate(prompt, ANSWER, want=CACHED, deadline_s=600.0)
        n_cached += int(rollout.arrays["cached_tokens"][0])
        n_prompt += rollout.n_prompt_tokens

    begun_at = time.perf_counter()
    await asyncio.gather(*map(ask, questions))
    seconds = time.perf_counter() - begun_at
    return {"hit_rate": n_cached / n_prompt, "per_s": n_requests / seconds}


def _summary(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    names = turns[0].keys()
    return {name: round(statistics.median(each[name] for each in turns), 3) for name in names}


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    documents = _documents(options)
    max_context = options.tokens + N_OWN + N_NEW + 24
    # A worker holds its share of the documents and one more, and what runs.
    n_held = -(-options.documents // options.workers) + 1
    kv_tokens = options.tokens * n_held + SLOTS * max_context
    turns: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="rolloutbus-") as folder:
        _model(Path(folder), max_context)
        async with AsyncExitStack() as stack:
            clients: dict[bool, RolloutClient] = {}
            for reports in turns:
                engine = {"threads": 1, "slots": SLOTS, "kv_tokens": kv_tokens}
                fleet = rolloutbus.up(
                    model=folder,
                    workers=options.workers,
                    store=False,
                    engine_options={**engine, "report_prefixes": reports},
                )
                address = (await stack.enter_async_context(fleet)).address
                connected = connect(address, name="benchmark")
                clients[reports] = await stack.enter_async_context(connected)
            for n in range(options.rounds):
                for reports, client in clients.items():
                    turn = await _turn(client, documents, options, seed=n)
                    turns[reports].append(turn)
                    if not options.json:
                        print("told" if reports else "silent", turn, flush=True)
    ratios = [a["per_s"] / b["per_s"] for a, b in zip(turns[True], turns[False], strict=True)]
    ratio = round(statistics.median(ratios), 2)
    return {
        "ratio": ratio,
        "goal": GOAL,
        "is_met": ratio >= GOAL,
        "told": _summary(turns[True]),
        "silent": _summary(turns[False]),
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Prefix affinity against the same without")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each fleet")
    parser.add_argument("--workers", type=int, default=3, help="in each fleet")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="of a document")
    parser.add_argument("--requests", type=int, default=120, help="in a turn")
    parser.add_argument("--at-once", type=int, default=6)
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
