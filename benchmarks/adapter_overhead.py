"""Measures what TRL's adapter costs: tokens a second of a batch, against TRL's own generation.

One trainer samples as TRL does it without vLLM, by `transformers.generate` in its own process; a
second one samples on a fleet of one worker. The same batches also go through the plain client. All
three have the same model and one thread to compute with, and take turns, so that other work on the
machine slows them alike. TRL's own way tells no logprobs; the other two do.

    .venv-trl/bin/python -m benchmarks.adapter_overhead --json   # `make .venv-trl/.installed` first
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# TRL is not installed where types are checked.

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing}: run `make .venv-trl/.installed`, then this with .venv-trl/bin/python instead"
    )

import rolloutbus
from rolloutbus import SamplingParams
from rolloutbus.examples.task import ALPHABET, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model
from rolloutbus.trainer_adapter.frameworks.trl import FleetOptions, use_fleet

BATCHES = (8, 32)
N_SAMPLES = 4
"""Of each prompt."""
N_TOKENS = 96
WORDS = [letter * 8 for letter in ALPHABET]

Way = Callable[[int], int]
"""Samples a batch of so many rows; returns the number of its tokens."""


def _trainer(model: Path, directory: str, *, is_fleet: bool) -> Any:  # noqa: ANN401 - TRL's
    tokenizer = AutoTokenizer.from_pretrained(model)
    # The model never says it, so each row has its full length.
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return GRPOTrainer(
        model=str(model),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": WORDS}),
        args=GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=N_SAMPLES,
            num_generations=N_SAMPLES,
            max_completion_length=N_TOKENS,
            use_vllm=is_fleet,
            vllm_mode="server",
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
    )


def _by_trainer(trainer: Any) -> Way:  # noqa: ANN401 - TRL's
    def sample(n_rows: int) -> int:
        prompts = [prompt for prompt in _prompts(n_rows) for _ in range(N_SAMPLES)]
        completions, _ = trainer._generate_single_turn(prompts, None, {}, N_SAMPLES)  # noqa: SLF001
        return sum(map(len, completions))

    return sample


def _by_client(client: rolloutbus.SyncRolloutClient) -> Way:
    def sample(n_rows: int) -> int:
        how = SamplingParams(max_new_tokens=N_TOKENS)
        groups = client.generate_batch(_prompts(n_rows), how, n=N_SAMPLES)
        return sum(len(rollout.tokens) for group in groups for rollout in group)

    return sample


def _prompts(n_rows: int) -> list[list[int]]:
    return [prompt_tokens(word) for word in WORDS[: n_rows // N_SAMPLES]]


def _speed(way: Way, n_rows: int) -> float:
    began = time.perf_counter()
    n_tokens = way(n_rows)
    assert n_tokens == n_rows * N_TOKENS
    return n_tokens / (time.perf_counter() - began)


def _compare(ways: dict[str, Way], n_rows: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, and ratios of the best speeds, which a busy machine hides less."""
    names = list(ways)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        for name in names if turn % 2 else reversed(names):  # who is first is last next time
            speed = _speed(ways[name], n_rows)
            if turn >= 0:  # the round before warms up
                speeds[name].append(speed)
    seen: dict[str, Any] = {
        f"{name}_tokens_per_s": round(statistics.median(each)) for name, each in speeds.items()
    }
    for name in ("adapter", "client"):
        pairs = zip(speeds[name], speeds["in_process"], strict=True)
        ratios = sorted(speed / own for speed, own in pairs)
        seen[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        seen[f"{name}_ratios"] = [round(each, 2) for each in ratios]
        seen[f"{name}_best_ratio"] = round(max(speeds[name]) / max(speeds["in_process"]), 3)
    return seen


def _measure(address: str, model: Path, directory: str, options: argparse.Namespace) -> Any:  # noqa: ANN401 - JSON
    torch.set_num_threads(1)
    in_process = _trainer(model, directory, is_fleet=False)
    use_fleet(FleetOptions(address=address))
    on_fleet = _trainer(model, directory, is_fleet=True)
    with rolloutbus.connect_sync(address) as client:
        ways = {
            "in_process": _by_trainer(in_process),
            "adapter": _by_trainer(on_fleet),
            "client": _by_client(client),
        }
        report: dict[str, Any] = {}
        for n_rows in BATCHES:
            report[f"batch_{n_rows}"] = seen = _compare(ways, n_rows, options.rounds)
            if not options.json:
                print(f"{n_rows} rows: {seen}")
    report["machine"] = {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}
    return report


async def _run(options: argparse.Namespace) -> Any:  # noqa: ANN401 - JSON
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        build_tiny_model(model, seed=0)
        slots = {"threads": 1, "slots": max(BATCHES)}
        async with rolloutbus.up(model=model, workers=options.workers, engine_options=slots) as up:
            return await asyncio.to_thread(_measure, up.address, model, directory, options)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Tokens a second by TRL's adapter")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=15, help="of each batch size")
    parser.add_argument("--workers", type=int, default=1)
    print(json.dumps(asyncio.run(_run(parser.parse_args()))))


if __name__ == "__main__":
    main()
