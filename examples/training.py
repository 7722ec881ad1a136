"""The demo's training loop: takes rollouts, improves the model, publishes the new weights."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from collections.abc import Mapping
from time import monotonic

import numpy as np
import torch

from rolloutbus import WeightPublisher
from rolloutbus.examples.demo_report import StepMetrics
from rolloutbus.examples.grpo import Batch, Learner, group_advantages
from rolloutbus.examples.rollouts import Group, RolloutFeed
from rolloutbus.examples.task import prompt_tokens, token_rewards

PUBLISH_DEADLINE_S = 120.0


class Training:
    """One trainer. Rollouts are sampled all the while by the engines behind `feed`."""

    def __init__(
        self, feed: RolloutFeed, learner: Learner, publisher: WeightPublisher | None
    ) -> None:
        self.steps: list[StepMetrics] = []
        self.version = 0
        """Last one published; 0 for the weights that the engines started with."""
        self._feed = feed
        self._learner = learner
        self._publisher = publisher
        """None: the engines keep what they started with."""
        self._started_at = monotonic()
        self._n_tokens_seen = 0

    @property
    def elapsed_s(self) -> float:
        """Since the training began."""
        return monotonic() - self._started_at

    async def step(self, *, patience_s: float) -> StepMetrics:
        """Train on the next groups and publish the outcome.

        Args:
            patience_s: how long to wait for the groups.

        Raises:
            TimeoutError: they did not come; nothing was changed.
        """
        called_at = monotonic()
        async with asyncio.timeout(patience_s):
            groups = await self._feed.take(self.version)
        batch, rewards = make_batch(groups)
        began_at, busy_began_s = monotonic(), self._feed.busy.read_s()
        # In a thread, where torch lets go of the GIL: this loop goes on serving rollouts.
        report = await asyncio.to_thread(self._learner.step, batch)
        ended_at, busy_s = monotonic(), self._feed.busy.read_s() - busy_began_s
        staleness = self.version - np.concatenate([group.token_versions for group in groups])
        stall_ms = await self._publish()
        self._feed.give_back(groups)
        metrics = StepMetrics(
            step=len(self.steps) + 1,
            version=self.version,
            elapsed_s=self.elapsed_s,
            reward=rewards,
            n_tokens=len(staleness),
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            n_stale_tokens=int((staleness >= 1).sum()),
            tokens_per_s=self._tokens_since_last_step() / (monotonic() - called_at),
            wait_s=began_at - called_at,
            train_s=ended_at - began_at,
            busy_s=busy_s,
            publish_s=monotonic() - ended_at,
            stall_ms=dict(stall_ms),
            loss=report.loss,
            clipped_share=report.clipped_share,
            ratio_error=report.ratio_error,
            rids=[rollout.rid for group in groups for rollout in group.rollouts],
        )
        self.steps.append(metrics)
        return metrics

    async def _publish(self) -> Mapping[str, float]:
        """Bring the weights to all engines; stall in ms per worker."""
        if self._publisher is None:
            return {}
        published = await self._publisher.publish(
            self._learner.model.named_parameters(),
            in_flight="keep",
            deadline_s=PUBLISH_DEADLINE_S,
        )
        self.version = published.version
        return published.stall_ms

    def _tokens_since_last_step(self) -> int:
        n_tokens = self._feed.ledger.n_tokens
        n_new, self._n_tokens_seen = n_tokens - self._n_tokens_seen, n_tokens
        return n_new


def make_batch(groups: list[Group]) -> tuple[Batch, float]:
    """Turn rollouts into tensors; also returns their mean reward."""
    rollouts = [(group.word, rollout) for group in groups for rollout in group.rollouts]
    rewards = torch.from_numpy(
        np.stack(
            [
                [token_rewards(group.word, rollout.tokens) for rollout in group.rollouts]
                for group in groups
            ]
        )
    )
    batch = Batch(
        prompts=torch.tensor([prompt_tokens(word) for word, _ in rollouts]),
        tokens=torch.from_numpy(np.stack([rollout.tokens for _, rollout in rollouts])).long(),
        logprobs=torch.from_numpy(np.stack([rollout.logprobs for _, rollout in rollouts])),
        advantages=group_advantages(rewards).flatten(0, 1),
    )
    return batch, rewards.mean().item()
