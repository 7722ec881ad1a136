"""What both loops of `rl_loop.py` train on: the prompts, the reward, and a GRPO step on one GPU.

Lengths are drawn beforehand, lognormal as those of reasoning models are, and both loops ask for the
same ones in the same order: made-up weights end their texts at no sensible place. The reward is the
share of a rollout's tokens in the lower half of the vocabulary, which is 0.5 by chance.
"""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from rolloutbus.examples.grpo import clipped_loss

LEARNING_RATE = 1e-5
WIDTH = 64
"""Rows are padded to a multiple of it, so that there are few shapes: for each new one, libraries of
the GPU look for kernels, which takes as long as the work itself."""
PLACES = 2048
"""Of the logits that exist at a time; each of them has a number for every word."""


class Load(msgspec.Struct, frozen=True):
    """How much is sampled and trained on."""

    device: str
    """`cuda`: trains on the first GPU and samples on the second; or `cpu`."""
    vocabulary: int
    groups: int
    """Of a training step."""
    group: int
    """Rollouts of one prompt."""
    prompt_tokens: int
    median: int
    """New tokens of a rollout."""
    sigma: float
    longest: int
    micro_tokens: int
    """Places of a forward pass, those of prompts and padding included."""
    bound: int
    """Versions that the oldest token trained on may lie behind; the synchronous loop knows none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, and how long the rollouts of its group become."""

    prompt: list[int]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollouts of one prompt."""

    prompt: list[int]
    tokens: Sequence[Sequence[int]]
    """Of each rollout."""
    logprobs: Sequence[Sequence[float]]
    """Of each rollout: under the weights that sampled it."""


class StepReport(msgspec.Struct, frozen=True):
    """What a training step was like."""

    rollouts: int
    tokens: int
    reward: float
    ratio_error: float
    """Mean of |ratio - 1| before the step: how far the policy is from those that sampled."""
    memory_retries: int
    """Times that the GPU had no memory left until torch gave back what it kept: each is slow."""


def asked(load: Load, number: int) -> Asked:
    """The group of this number; the same in both loops."""
    chance = Random(number)
    lengths = [
        max(1, min(load.longest, round(load.median * chance.lognormvariate(0.0, load.sigma))))
        for _ in range(load.group)
    ]
    prompt = [chance.randrange(3, load.vocabulary) for _ in range(load.prompt_tokens)]
    return Asked(prompt, lengths)


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: list[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


class Trainer:
    """A model in the dtype of engines; its optimizer works on a copy in float32."""

    def __init__(self, folder: Path, load: Load) -> None:
        self.device = torch.device("cuda:0" if load.device == "cuda" else "cpu")
        self._load = load
        torch.manual_seed(0)
        dtype = torch.bfloat16 if load.device == "cuda" else torch.float32
        with self.device:
            model = cast("Any", AutoModelForCausalLM).from_config(
                AutoConfig.from_pretrained(folder), attn_implementation="sdpa", dtype=dtype
            )
        self._model = model.train()
        named = cast("dict[str, Tensor]", dict(model.named_parameters()))
        self._names = [*named]
        self._parameters = [*named.values()]
        # A step is often less than what the last bit of bfloat16 is worth.
        self._exact = [each.detach().to(torch.float32, copy=True) for each in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._exact, lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    def weights(self) -> dict[str, Tensor]:
        """For engines; valid until the next step."""
        return dict(zip(self._names, [each.detach() for each in self._parameters], strict=True))

    def step(self, groups: list[Sampled]) -> StepReport:
        """Improve the model by one gradient step on all of these. Blocks."""
        rows, reward = rows_of(groups, self._load.vocabulary // 2)
        n_retries = self._memory_retries()
        n_tokens = sum(len(row.tokens) for row in rows)
        error = torch.zeros((), device=self.device)
        for batch in micro_batches(rows, self._load.micro_tokens):
            error += self._accumulate(batch, n_tokens)
        for exact, each in zip(self._exact, self._parameters, strict=True):
            assert each.grad is not None
            exact.grad, each.grad = each.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._exact, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for exact, each in zip(self._exact, self._parameters, strict=True):
            each.detach().copy_(exact)
        n_retries = self._memory_retries() - n_retries
        return StepReport(len(rows), n_tokens, reward, error.item() / n_tokens, n_retries)

    def rest(self) -> None:
        """Give memory back that only the next step needs: it is the other loop's turn."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory_retries(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)

    def _accumulate(self, rows: list[_Row], n_all: int) -> Tensor:
        """Adds the gradient of these rows; returns the sum of their |ratio - 1|."""
        width = _width(rows[0])
        n_rows = max(1, self._load.micro_tokens // width)
        # Padding stands behind the tokens, where a causal model looks from no token: no mask.
        inputs = torch.zeros(n_rows, width, dtype=torch.int64)
        asking: list[int] = []  # the places whose outcomes are the sampled tokens
        for number, row in enumerate(rows):
            known = [*row.prompt, *row.tokens[:-1]]
            inputs[number, : len(known)] = torch.tensor(known)
            first = number * width + len(row.prompt) - 1
            asking += range(first, first + len(row.tokens))
        targets = self._tensor([token for row in rows for token in row.tokens])
        sampled = self._tensor([logprob for row in rows for logprob in row.logprobs])
        advantages = self._tensor([row.advantage for row in rows for _ in row.tokens])
        model = self._model.model
        hidden: Tensor = model(input_ids=inputs.to(self.device), use_cache=False).last_hidden_state
        logprobs = self._logprobs(hidden.flatten(0, 1), self._tensor(asking), targets)
        loss = clipped_loss(logprobs, sampled, advantages)
        (loss * (len(asking) / n_all)).backward()
        return ((logprobs.detach() - sampled).exp() - 1).abs().sum()

    def _tensor(self, numbers: list[int] | list[float]) -> Tensor:
        return torch.tensor(numbers).to(self.device)

    def _logprobs(self, hidden: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """float32 [n]; the logits of few places at a time exist, and again for their gradient."""
        again = cast("Any", checkpoint).checkpoint
        n_more = -len(places) % PLACES
        places, padded = (torch.nn.functional.pad(each, (0, n_more)) for each in (places, targets))
        pieces = [slice(at, at + PLACES) for at in range(0, len(places), PLACES)]
        return torch.cat(
            [
                again(
                    self._piece, hidden.index_select(0, places[at]), padded[at], use_reentrant=False
                )
                for at in pieces
            ]
        )[: len(targets)]

    def _piece(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(hidden).float()
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def rows_of(groups: list[Sampled], half: int) -> tuple[list[_Row], float]:
    """All rollouts with their advantages in their group; and the mean reward."""
    rows: list[_Row] = []
    rewards: list[float] = []
    for each in groups:
        found = torch.tensor(
            [sum(token < half for token in tokens) / len(tokens) for tokens in each.tokens]
        )
        advantages = cast("list[float]", ((found - found.mean()) / (found.std() + 1e-4)).tolist())
        rewards += cast("list[float]", found.tolist())
        rows += [
            _Row(each.prompt, *row)
            for row in zip(each.tokens, each.logprobs, advantages, strict=True)
        ]
    return rows, sum(rewards) / len(rewards)


def micro_batches(rows: list[_Row], max_places: int) -> Iterator[list[_Row]]:
    """Rows of like lengths together, so that little is padding; the longest first."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda each: -len(each.tokens)):
        if batch and (len(batch) + 1) * _width(batch[0]) > max_places:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _width(row: _Row) -> int:
    """Places of a micro batch's row; the last token is predicted, and asks for nothing."""
    return -(-(len(row.prompt) + len(row.tokens) - 1) // WIDTH) * WIDTH
