"""A model of real shapes with random weights, and what a trainer holds of it."""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

VOCABULARY = 32_000
CHANGED_SHARE = 0.02
"""Elements that a sparse step changes, like an optimiser step with a small learning rate."""


def build_model(directory: Path, layers: int) -> dict[str, torch.Tensor]:
    """Write a float32 Llama with `layers` layers of 17 million parameters; returns its weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    return {name: each.detach() for name, each in model.named_parameters()}


class HeldModel:
    """The trainer's weights, which change from step to step."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.size_bytes = sum(each.nbytes for each in tensors.values())
        self._generator = torch.Generator().manual_seed(0)

    def step(self, *, sparse: bool) -> None:
        """Change every tensor: one element of it, or some in a hundred."""
        for each in self.tensors.values():
            flat = each.view(-1)
            n_changed = max(1, int(len(flat) * CHANGED_SHARE)) if sparse else 1
            chosen = torch.randint(len(flat), (n_changed,), generator=self._generator)
            flat[chosen] += 1e-4
