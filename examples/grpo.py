"""GRPO on whole batches of rollouts: advantages, loss, and the learner that takes the steps.

Two things make it fit for rollouts that were sampled by several, older versions of the model:

- Each token's importance ratio is taken against the logprob that came *with the rollout*, which
  is that of the weights that sampled this very token. No old copy of the model is kept, and a
  rollout that lived through an update needs no special case.
- The ratio is clipped (as in PPO), so a token that the policy has already moved away from stops
  pulling once it is out of the trusted range.

Advantages are relative to the group, as GRPO has it, and taken position by position: a letter of
the answer is judged alone, since none can change what another one earns. They are not divided
by the group's standard deviation, which would blow the few errors of a good policy up to full size.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLIP_LOW = 0.2
CLIP_HIGH = 0.28
"""A little more room upwards keeps rare right guesses growing."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts of some groups, padded to nothing: all have the same length."""

    prompts: Tensor
    """int64 [n, n_prompt_tokens]."""
    tokens: Tensor
    """int64 [n, n_tokens], sampled by the engines."""
    logprobs: Tensor
    """float32 [n, n_tokens]: each under the version of the weights that sampled it."""
    advantages: Tensor
    """float32 [n, n_tokens]."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one training step was like."""

    loss: float
    clipped_share: float
    """Share of the tokens whose ratio was outside of the clip range."""
    ratio_error: float
    """Mean of |ratio - 1|: how far the policy has moved from those that sampled."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """Hyperparameters. The learning rate warms up, then falls linearly to a tenth."""

    steps: int
    learning_rate: float = 1.5e-3
    warmup_steps: int = 5
    final_rate: float = 0.1
    max_grad_norm: float = 1.0


def group_advantages(rewards: Tensor) -> Tensor:
    """float32 [n_groups, group_size, n_tokens] -> the same: reward minus the group's mean."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def clipped_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """Mean clipped surrogate loss; float32 [n, n_tokens] each -> float32 scalar.

    Args:
        logprobs: under the weights being trained; carries the gradient.
        behaviour: as they came with the rollouts.
        advantages: see `group_advantages`.
    """
    ratio = (logprobs - behaviour).exp()
    trusted = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, trusted * advantages).mean()


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `clipped_loss`."""


class Learner:
    """Owns the model being trained and its optimizer. Not thread-safe: one step at a time."""

    def __init__(
        self, model: nn.Module, options: LearnerOptions, loss: Loss = clipped_loss
    ) -> None:
        self.model = model.train()
        self._options = options
        self._loss = loss
        self._n_steps = 0
        # A longer memory of squared gradients (0.99) stays calm when they shrink towards the end.
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def step(self, batch: Batch) -> StepReport:
        """Improve the model by one gradient step. Blocks; torch releases the GIL meanwhile."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        logprobs = self._logprobs(batch)
        loss = self._loss(logprobs, batch.logprobs, batch.advantages)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._options.max_grad_norm)
        self._optimizer.step()
        self._n_steps += 1
        return _report(loss.detach(), logprobs.detach() - batch.logprobs)

    def _learning_rate(self) -> float:
        options = self._options
        warmup = min(1.0, (self._n_steps + 1) / options.warmup_steps)
        decay = 1 - (1 - options.final_rate) * min(1.0, self._n_steps / options.steps)
        return options.learning_rate * warmup * decay

    def _logprobs(self, batch: Batch) -> Tensor:
        """float32 [n, n_tokens] of the sampled tokens under the current weights."""
        inputs = torch.cat([batch.prompts, batch.tokens[:, :-1]], dim=1)
        logits: Tensor = self.model(input_ids=inputs).logits[:, -batch.tokens.shape[1] :]
        return logits.log_softmax(-1).gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)


def _report(loss: Tensor, log_ratio: Tensor) -> StepReport:
    ratio = log_ratio.exp()
    outside = (ratio < 1 - CLIP_LOW) | (ratio > 1 + CLIP_HIGH)
    return StepReport(
        loss=loss.item(),
        clipped_share=outside.float().mean().item(),
        ratio_error=(ratio - 1).abs().mean().item(),
    )
