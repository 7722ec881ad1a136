"""Fixtures for tests with real processes: a tiny real model on disk."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 64


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama of about 0.2 M parameters, float32."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
