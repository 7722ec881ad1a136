# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import pytest
import torch
from torch import Tensor, nn

from rolloutbus.examples.grpo import Batch, Learner, LearnerOptions, clipped_loss, group_advantages


class Bigrams(nn.Module):
    """The smallest language model: logits of the next token by the last one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab_size, vocab_size))

    def forward(self, input_ids: Tensor) -> object:
        class Output:
            logits = self.table[input_ids]

        return Output()


def _batch(model: Bigrams, advantages: list[list[float]]) -> Batch:
    tokens = torch.tensor([[2, 3], [3, 2]])
    prompts = torch.tensor([[0, 1], [0, 1]])
    inputs = torch.cat([prompts, tokens[:, :-1]], dim=1)
    logprobs = model.table[inputs[:, -2:]].log_softmax(-1).gather(-1, tokens[..., None])
    return Batch(prompts, tokens, logprobs.squeeze(-1).detach(), torch.tensor(advantages))


def _probability(model: Bigrams, last: int, following: int) -> float:
    return model.table[last].softmax(-1)[following].item()


def test_advantages_are_relative_to_the_group_at_each_position() -> None:
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]])

    advantages = group_advantages(rewards)

    assert advantages.tolist() == [[[0.5, 0.0], [-0.5, 0.0]], [[0.0, 0.5], [0.0, -0.5]]]


def test_a_group_of_equals_teaches_nothing() -> None:
    assert not group_advantages(torch.ones(3, 4, 5)).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_raises_the_logprob_of_what_was_better_and_lowers_the_rest(
    advantage: float,
) -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)

    clipped_loss(logprobs, torch.tensor([[-1.0]]), torch.tensor([[advantage]])).backward()

    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-advantage)


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.5, 1.0), (-0.5, -1.0)])
def test_token_that_has_already_moved_far_enough_stops_pulling(
    log_ratio: float, advantage: float
) -> None:
    logprobs = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)

    clipped_loss(logprobs, torch.tensor([[-1.0]]), torch.tensor([[advantage]])).backward()

    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.5, -1.0), (-0.5, 1.0)])
def test_token_that_has_moved_the_wrong_way_is_pulled_back(
    log_ratio: float, advantage: float
) -> None:
    logprobs = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)

    clipped_loss(logprobs, torch.tensor([[-1.0]]), torch.tensor([[advantage]])).backward()

    assert logprobs.grad is not None
    assert logprobs.grad.item() * advantage < 0


def test_step_makes_the_better_token_likelier_after_the_token_before_it() -> None:
    model = Bigrams(4)
    learner = Learner(model, LearnerOptions(steps=10))

    learner.step(_batch(model, [[1.0, 0.0], [-1.0, 0.0]]))

    assert _probability(model, 1, 2) > 0.25 > _probability(model, 1, 3)
    assert _probability(model, 2, 3) == pytest.approx(0.25)


def test_report_says_how_far_the_policy_is_from_those_that_sampled() -> None:
    model = Bigrams(4)
    learner = Learner(model, LearnerOptions(steps=10))
    batch = _batch(model, [[1.0, 0.0], [-1.0, 0.0]])
    older = Batch(batch.prompts, batch.tokens, batch.logprobs + 1.0, batch.advantages)

    assert learner.step(batch).ratio_error == pytest.approx(0.0, abs=1e-6)
    assert learner.step(older).clipped_share == 1.0
