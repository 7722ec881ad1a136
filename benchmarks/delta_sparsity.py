"""How much of the weights does a real GRPO step change, and how many bytes does its delta have?

The demo's learner takes steps on rollouts of its own model, in this process and without a bus;
after each step the weights are encoded against those before it, as float32 and as the bfloat16 that
a trainer with float32 master weights would publish. The demo's learning rate is that of a model of
0.33 million parameters that learns in a minute; large models are trained with 1e-6 to 1e-5.

    python benchmarks/delta_sparsity.py --json
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The stubs of torch and transformers leave parameters untyped.

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import LlamaForCausalLM

from rolloutbus.bus.weights.manifest import Bytes, bytes_of, digest_of, lay_out, total_bytes
from rolloutbus.bus.weights.weight_delta import encode
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.examples.grpo import Batch, Learner, LearnerOptions, group_advantages
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens, token_rewards
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

DEMO_STEPS = 160
GROUPS, GROUP_SIZE = 8, 8
"""Of the demo, as its steps are."""
LEARNING_RATES = (LearnerOptions(steps=DEMO_STEPS).learning_rate, 1e-5, 1e-6)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
NAMES = {"bf16": "BF16", "f32": "F32"}


class Version(NamedTuple):
    """Weights as the store has them."""

    tensors: list[Tensor]
    content: Bytes


@dataclass(slots=True)
class Changes:
    """What the steps with one learning rate did to weights of one dtype."""

    ratios: list[float] = field(default_factory=list[float])
    """Bytes of the delta per byte of the version; 1 where there is none that is smaller."""
    changed: list[float] = field(default_factory=list[float])
    """Share of the elements."""
    gb_per_s: list[float] = field(default_factory=list[float])
    """Encoding, in bytes of the version."""

    def report(self) -> dict[str, float]:
        """Means over all steps, and the extremes of the ratio."""
        return {
            "ratio": round(statistics.mean(self.ratios), 4),
            "ratio_min": round(min(self.ratios), 4),
            "ratio_max": round(max(self.ratios), 4),
            "changed_elements": round(statistics.mean(self.changed), 4),
            "encode_gb_per_s": round(statistics.median(self.gb_per_s), 3),
        }


def versions(learner: Learner) -> dict[str, Version]:
    """The learner's weights, in each dtype."""
    return {name: _version(learner, name) for name in DTYPES}


def _version(learner: Learner, name: str) -> Version:
    weights = {n: each.detach() for n, each in learner.model.named_parameters()}
    layout = lay_out((n, NAMES[name], tuple(each.shape)) for n, each in weights.items())
    content = np.zeros(total_bytes(layout), np.uint8)
    tensors: list[Tensor] = []
    for tensor in layout:
        place = bytes_of(content, tensor)
        place[:] = weights[tensor.name].to(DTYPES[name]).view(-1).view(torch.uint8).numpy()
        tensors.append(msgspec.structs.replace(tensor, digest=digest_of(place)))
    return Version(tensors, content)


def compare(old: Version, new: Version, changes: Changes) -> None:
    """Encode the delta of one step."""
    began = time.perf_counter()
    delta = encode(old.content, old.tensors, new.content, new.tensors)
    took_s = time.perf_counter() - began
    kind = np.uint16 if old.tensors[0].dtype == "BF16" else np.uint32
    items = (
        (bytes_of(old.content, a).view(kind), bytes_of(new.content, b).view(kind))
        for a, b in zip(old.tensors, new.tensors, strict=True)
    )
    counts = [(int(np.count_nonzero(a != b)), len(a)) for a, b in items]
    changes.changed.append(sum(n for n, _ in counts) / sum(n for _, n in counts))
    changes.ratios.append(1.0 if delta is None else len(delta.content) / len(new.content))
    changes.gb_per_s.append(len(new.content) / took_s / 1e9)


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 and float32 [n, WORD_LETTERS]: tokens, and their logprobs."""
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    inputs, past = prompts, None
    for _ in range(WORD_LETTERS):
        output: Any = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = output.past_key_values
        rows = output.logits[:, -1].log_softmax(-1)
        inputs = torch.multinomial(rows.exp(), 1)
        tokens.append(inputs)
        logprobs.append(rows.gather(-1, inputs))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def batches(model: LlamaForCausalLM, rng: Random, n: int) -> Iterator[Batch]:
    """Yields rollouts under the model's present weights, one batch per request."""
    for _ in range(n):
        words = [word for word in draw_words(rng, GROUPS) for _ in range(GROUP_SIZE)]
        prompts = torch.tensor([prompt_tokens(word) for word in words])
        tokens, logprobs = sample(model, prompts)
        answers = tokens.to(torch.int32).numpy()
        rows = [token_rewards(word, row) for word, row in zip(words, answers, strict=True)]
        rewards = torch.from_numpy(np.stack(rows)).view(GROUPS, GROUP_SIZE, WORD_LETTERS)
        yield Batch(prompts, tokens, logprobs, group_advantages(rewards).flatten(0, 1))


def measure(learning_rate: float, steps: int, seed: int) -> dict[str, Changes]:
    """Changes of all steps with one learning rate, by dtype."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        build_tiny_model(Path(directory), seed)
        model = load_tiny_model(Path(directory))
    learner = Learner(model, LearnerOptions(steps=DEMO_STEPS, learning_rate=learning_rate))
    changes = {name: Changes() for name in DTYPES}
    before = versions(learner)
    for batch in batches(model, Random(seed), steps):
        learner.step(batch)
        after = versions(learner)
        for name, each in changes.items():
            compare(before[name], after[name], each)
        before = after
    return changes


def main() -> None:
    """Measure every learning rate."""
    parser = argparse.ArgumentParser(description="Bytes of the delta of a GRPO step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        {"learning_rate": rate, "dtype": name, **changes.report()}
        for rate in options.learning_rates
        for name, changes in measure(rate, options.steps, options.seed).items()
    ]
    if options.json:
        print(json.dumps({"steps": options.steps, "seed": options.seed, "results": results}))
        return
    print("learning rate  dtype  delta/version   (min … max)        changed  encode GB/s")
    for each in results:
        print(
            f"{each['learning_rate']:<13g}  {each['dtype']:<5}  {each['ratio']:<13.4f}  "
            f"({each['ratio_min']:.4f} … {each['ratio_max']:.4f})  "
            f"{each['changed_elements']:7.2%}  {each['encode_gb_per_s']:.2f}"
        )


if __name__ == "__main__":
    main()
