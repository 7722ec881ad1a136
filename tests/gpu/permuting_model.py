"""A model whose greedy next token is known: a permutation of the last one, another per version.

The embedding of the last token dominates, and row `p[t]` of the output layer is that embedding: the
margin is so wide that no batch, no cache and no kernel changes a token. So each token tells by
itself which weights sampled it.
"""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 32_000
HEAD_SIZE = 64
N_KV_HEADS = 2
FIRST_FREE = 16
"""Ids below are special and never sampled."""


def permutation(seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Next token of each token under the weights of this seed."""
    free = np.arange(FIRST_FREE, VOCAB_SIZE)
    order = np.random.default_rng(seed).permutation(free)
    following = np.arange(VOCAB_SIZE)
    following[order] = np.roll(order, 1)  # one cycle: no token follows itself
    return following


class PermutingModel:
    """Qwen2 of some size on a GPU, in bfloat16."""

    def __init__(self, hidden_size: int = 896, layers: int = 8) -> None:
        config = Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // HEAD_SIZE,
            num_key_value_heads=N_KV_HEADS,
            max_position_embeddings=4096,
            initializer_range=0.002,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        self._hidden_size = hidden_size
        self.kv_bytes_per_token = layers * 2 * N_KV_HEADS * HEAD_SIZE * 2
        """In bfloat16: keys and values of all layers."""
        self._embedding = self.model.model.embed_tokens.weight.data.normal_()
        self.become(0)

    def become(self, seed: int) -> None:
        """Take the weights of another permutation."""
        scale = (math.log(VOCAB_SIZE) + 12.0) / self._hidden_size
        rows = torch.from_numpy(permutation(seed)).cuda()
        self.model.lm_head.weight.data[rows] = self._embedding * scale

    def weights(self) -> dict[str, torch.Tensor]:
        """By name, where they are."""
        named: Iterable[tuple[str, torch.Tensor]] = self.model.named_parameters()
        return {name: each.detach() for name, each in named}

    def save(self, folder: Path) -> Path:
        """As a checkpoint; returns the folder."""
        self.model.save_pretrained(folder)
        return folder
