"""Tiny causal language models with random weights, and what plain forward passes of them say."""

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.engine_worker.engine import Bytes, Work
from rolloutbus.engine_worker.engines.transformers.engine import TransformersEngine
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings
from tests.step_log import StepLog, key

VOCAB = 64
TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "sliding": ("MistralConfig", {"sliding_window": 7}),
    "mixed": ("Gemma2Config", {"sliding_window": 7}),
    "positions": ("GPT2Config", {}),
}


def make_model(name: str, seed: int) -> Any:  # noqa: ANN401 - transformers is untyped
    kind, extra = CONFIGS[name]
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = getattr(transformers, kind)(**SHAPE, **extra)
    # Older releases of transformers forget to cap the scores of Gemma 2 unless told so.
    attention = "eager" if name == "mixed" else "sdpa"
    models = cast("Any", transformers.AutoModelForCausalLM)
    return models.from_config(config, attn_implementation=attention).eval()


Build = Callable[..., TransformersEngine]


def save_models(root: Path) -> dict[str, Path]:
    """Every model of `CONFIGS` with its first weights, in a directory each."""
    torch.set_num_threads(1)
    paths = {name: root / name for name in CONFIGS}
    for name, path in paths.items():
        make_model(name, 0).save_pretrained(path)
    return paths


@contextmanager
def engines(log: StepLog, paths: dict[str, Path]) -> Generator[Build]:
    """A function that builds engines; they are closed at the end."""
    built: list[TransformersEngine] = []

    def build(name: str = "llama", **settings: Any) -> TransformersEngine:  # noqa: ANN401
        settings = {"device": "cpu", "slots": 8, "threads": 1, **settings}
        built.append(TransformersEngine(TransformersSettings(str(paths[name]), **settings), log))
        return built[-1]

    try:
        yield build
    finally:
        log.release()
        for engine in built:
            engine.close()


def prompt(n: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(2, VOCAB, n).astype(np.int32)


def work(name: str, n: int = 12, n_prompt: int = 9, **sampling: Any) -> Work:  # noqa: ANN401
    """A request whose prompt depends on its name."""
    options: dict[str, Any] = {
        "ignore_eos": True,
        "sampling_seed": 3,
        "max_new_tokens": n,
        **sampling,
    }
    return Work(key(name), prompt(n_prompt, sum(name.encode())), SamplingParams(**options))


def changed(model: Any, seed: int) -> dict[str, Bytes]:  # noqa: ANN401
    """New weights for `model`, installed in it and returned as raw bytes."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return {n: p.detach().numpy().reshape(-1).view(np.uint8) for n, p in model.named_parameters()}


@torch.no_grad()
def fresh(model: Any, tokens: np.ndarray, n_prompt: int, temperature: float = 1.0) -> list[float]:  # noqa: ANN401
    """Logprob of every token after the prompt, from one forward pass over all of them."""
    logits = model(input_ids=torch.as_tensor(tokens, dtype=torch.int64)[None]).logits[0].float()
    logprobs = torch.log_softmax(logits[n_prompt - 1 : -1] / temperature, -1)
    ids = torch.as_tensor(tokens[n_prompt:], dtype=torch.int64)
    return [float(x) for x in logprobs.gather(1, ids[:, None])[:, 0]]


def check_fresh(log: StepLog, w: Work, model: Any, temperature: float = 1.0) -> None:  # noqa: ANN401
    """The emitted logprobs are those of `model`, all of them."""
    emitted = log[w.key[0]]
    tokens = np.concatenate([w.prompt, np.array(emitted.tokens, np.int32)])
    want = fresh(model, tokens, len(w.prompt), temperature)
    np.testing.assert_allclose(emitted.logprobs, want, atol=TOLERANCE, rtol=0)


def claim_too_much(model: Path) -> None:
    """Add a file of weights that no machine can hold: 4 TiB of nothing, of which no disk knows."""
    shape = [1 << 20, 1 << 20]
    size_bytes = 4 * shape[0] * shape[1]
    header = json.dumps({"huge": {"dtype": "F32", "shape": shape, "data_offsets": [0, size_bytes]}})
    path = model / "model-huge.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(path, path.stat().st_size + size_bytes)
