"""What training would make of a tiny model, and what the model itself says then."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rolloutbus import SamplingParams

GREEDY = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)

Trained = Any


def trained(tiny_model: Path, seed: int) -> Trained:
    """The fleet's model after some training."""
    model: Trained = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=chance), alpha=0.05)
    return model


def tensors_of(model: Trained) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def greedy(model: Trained, prompt: list[int]) -> list[int]:
    """What the model itself says."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(GREEDY.max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
