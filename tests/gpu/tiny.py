"""Tiny models with random weights in bfloat16, of shapes that the kernels of a GPU are made for."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

from rolloutbus import Rollout
from rolloutbus.bus.wire.codec import AnyArray
from tests.sglang.models import BOS, EOS, PAD, VOCAB_SIZE, byte_tokenizer

N_EXPERTS, N_CHOSEN = 8, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
EXPERTS: dict[str, Any] = {
    "num_experts": N_EXPERTS,
    "num_experts_per_tok": N_CHOSEN,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 0,
    "decoder_sparse_step": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "experts": ("Qwen2MoeConfig", EXPERTS),
}
NEAR, FAR = 0.1, 0.4
"""Mean error of logprobs: what bfloat16 costs at most, and what other weights cost at least."""

Experts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Logits = torch.Tensor
"""float32 [n, vocabulary]."""


def save_tiny(kind: str, path: Path) -> Path:
    """Write one of `KINDS`, always with the same weights, and a tokenizer of bytes."""
    torch.manual_seed(0)
    name, extra = KINDS[kind]
    config = getattr(transformers, name)(**SHAPE, **extra)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an expert of no size, which all places would share
        model = cast("Any", transformers.AutoModelForCausalLM).from_config(config)
    # It is in no checkpoint.
    state = model.to(torch.bfloat16).state_dict()
    kept = {name: each for name, each in state.items() if each.numel()}
    model.save_pretrained(path, state_dict=kept)
    byte_tokenizer().save_pretrained(path)
    return path


def load_tiny(path: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    """The same weights in float32, on the CPU."""
    loaders = cast("Any", transformers.AutoModelForCausalLM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return loaders.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], rollout: Rollout) -> Logits:  # noqa: ANN401
    """What a plain forward pass says in the place of each token."""
    ids = torch.tensor([[*prompt, *rollout.tokens.tolist()]])
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


def error_of(
    model: Any,  # noqa: ANN401
    prompt: Sequence[int],
    rollout: Rollout,
    shaped: Callable[[Logits], Logits] = lambda logits: logits,
) -> float:
    """Mean error of the logprobs that a rollout tells."""
    scores = torch.log_softmax(shaped(logits_of(model, prompt, rollout)), -1)
    tokens = torch.tensor(rollout.tokens.astype(np.int64))
    truth = scores.gather(1, tokens[:, None])[:, 0].numpy()
    return float(np.abs(truth - rollout.logprobs).mean())


@torch.no_grad()
def experts_of(model: Any, prompt: Sequence[int], rollout: Rollout) -> Experts:  # noqa: ANN401
    """int [places, layers, chosen]: in order of the experts' numbers."""
    ids = torch.tensor([[*prompt, *rollout.tokens[:-1].tolist()]])
    routers = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([logits.topk(N_CHOSEN, -1).indices for logits in routers], 1)
    return chosen.sort(-1).values.numpy()


def share_of_same(told: AnyArray, truth: Experts) -> float:
    """Of places and layers, those that went to the same experts."""
    return float((np.sort(told, -1) == truth).all(-1).mean())
