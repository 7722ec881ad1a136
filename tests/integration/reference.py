"""The truth about logprobs: what a fresh model computes for a finished rollout."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rolloutbus import Rollout

Weights = dict[str, torch.Tensor]


class Reference:
    """Every published version of one model, and forward passes with any of them."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        self.model = _load(model)
        self._versions: dict[int, Weights] = {}
        self.keep(0)

    def perturb(self, seed: int, scale: float = 0.02) -> None:
        """Change every weight a little, as a training step does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))

    def keep(self, version: int) -> None:
        """The model's present weights are this version."""
        state = self.model.state_dict()
        self._versions[version] = {name: value.clone() for name, value in state.items()}

    def fresh(self, prompt: list[int], rollout: Rollout, temperature: float) -> np.ndarray:
        """float32 [n]: each token under one forward pass with that token's version."""
        found = np.zeros(len(rollout.tokens), np.float32)
        for version in sorted({int(v) for v in rollout.token_versions}):
            logits = self._logits(prompt, rollout, version)
            rows = rollout.token_versions == version
            found[rows] = _picked(logits, rollout.tokens, temperature)[rows]
        return found

    def likeliest(self, prompt: list[int], rollout: Rollout) -> list[int]:
        """The best token in each place, after the tokens that were sampled before it."""
        found = np.zeros(len(rollout.tokens), np.int64)
        for version in sorted({int(v) for v in rollout.token_versions}):
            rows = rollout.token_versions == version
            found[rows] = self._logits(prompt, rollout, version).argmax(-1).numpy()[rows]
        return found.tolist()

    def by_runs(self, prompt: list[int], rollout: Rollout, temperature: float) -> np.ndarray:
        """float32 [n]: with the KV cache built run by run, as under `in_flight="keep"`.

        A resumed rollout's kept tokens were computed anew, in one piece, where it went on; their
        own logprobs are those of an earlier worker and are left out (NaN).
        """
        found = np.full(len(rollout.tokens), np.nan, np.float32)
        cache = DynamicCache()
        start = rollout.n_resumed
        pending = [*prompt, *rollout.tokens[:start].tolist()]
        while start < len(rollout.tokens):
            version = int(rollout.token_versions[start])
            same = rollout.token_versions[start:] == version
            stop = len(rollout.tokens) if same.all() else start + int(np.argmin(same))
            run = rollout.tokens[start:stop]
            self._load(version)
            ids = torch.tensor([[*pending, *run[:-1].tolist()]])
            with torch.no_grad():
                logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0]
            found[start:stop] = _picked(logits[-len(run) :], run, temperature)
            pending = [int(run[-1])]
            start = stop
        return found

    def _logits(self, prompt: list[int], rollout: Rollout, version: int) -> torch.Tensor:
        """float32 [n, vocabulary]: of one forward pass, in the place of each token."""
        self._load(version)
        ids = torch.tensor([[*prompt, *rollout.tokens.tolist()]])
        with torch.no_grad():
            return self.model(ids).logits[0, len(prompt) - 1 : -1]

    def _load(self, version: int) -> None:
        self.model.load_state_dict(self._versions[version])


def _load(path: Path) -> PreTrainedModel:
    model = cast("Any", AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
    return model.eval()


def _picked(logits: torch.Tensor, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-softmax after temperature, at the sampled tokens."""
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    return scores.gather(1, torch.tensor(tokens.astype(np.int64))[:, None])[:, 0].numpy()
