"""What both loops of `benchmarks/gpu/rl_loop.py` train on, and that they do train."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.rl_training import (
    WIDTH,
    Load,
    Sampled,
    Trainer,
    asked,
    micro_batches,
    rows_of,
)
from benchmarks.gpu.sglang_bus import VOCABULARY, write_shape

WORDS = VOCABULARY["tiny"]
LOAD = Load(
    device="cpu",
    vocabulary=WORDS,
    groups=2,
    group=8,
    prompt_tokens=6,
    median=12,
    sigma=0.8,
    longest=40,
    micro_tokens=4 * WIDTH,
    bound=1,
)


def rollouts(load: Load, seed: int) -> list[Sampled]:
    """Words drawn evenly, and what a policy that draws so says of them."""
    chance = Random(seed)
    groups: list[Sampled] = []
    for number in range(load.groups):
        group = asked(load, number)
        tokens = [[chance.randrange(WORDS) for _ in range(n)] for n in group.lengths]
        even = -float(torch.tensor(WORDS).log())
        groups.append(Sampled(group.prompt, tokens, [[even] * len(row) for row in tokens]))
    return groups


def test_the_same_number_asks_for_the_same() -> None:
    first, again, other = asked(LOAD, 3), asked(LOAD, 3), asked(LOAD, 4)
    assert first == again
    assert first != other
    assert len(first.prompt) == LOAD.prompt_tokens
    assert all(1 <= n <= LOAD.longest for n in first.lengths)


def test_each_row_is_in_one_micro_batch_and_none_is_too_large(seed: int) -> None:
    rows, _ = rows_of(rollouts(LOAD, seed), WORDS // 2)
    batches = list(micro_batches(rows, LOAD.micro_tokens))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))
    for batch in batches:
        places = max(len(row.prompt) + len(row.tokens) for row in batch) * len(batch)
        assert places <= LOAD.micro_tokens or len(batch) == 1


def test_a_rollout_is_judged_by_its_group_alone() -> None:
    low, high = [1, 2, 3, 4], [WORDS - 1] * 4
    even = [[-1.0] * 4] * 2
    mixed, alike = Sampled([5], [low, high], even), Sampled([5], [low, low], even)
    rows, reward = rows_of([mixed, alike], WORDS // 2)
    better, worse, *same = (row.advantage for row in rows)
    assert better == pytest.approx(-worse)
    assert better > 0
    assert same == [0.0, 0.0]
    assert reward == pytest.approx(0.75)


class Reference:
    """The trainer's model as engines get it, which looks at one rollout at a time."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        config = cast("Any", AutoConfig).from_pretrained(folder)
        self._model = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        self._model.load_state_dict(trainer.weights())

    def logprobs(self, prompt: list[int], tokens: Sequence[int]) -> list[float]:
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return found[range(len(tokens)), list(tokens)].tolist()

    def told(self, groups: list[Sampled], shift: float = 0.0) -> list[Sampled]:
        """The same rollouts, with what this model says of them; every other token's `shift` off."""
        return [
            Sampled(
                each.prompt,
                each.tokens,
                [
                    [
                        logprob + shift * (1 if place % 2 else -1)
                        for place, logprob in enumerate(self.logprobs(each.prompt, row))
                    ]
                    for row in each.tokens
                ],
            )
            for each in groups
        ]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    write_shape(tmp_path, "tiny")
    return Trainer(tmp_path, LOAD)


def test_it_knows_how_far_it_is_from_those_that_sampled(
    tmp_path: Path, trainer: Trainer, seed: int
) -> None:
    # Lengths differ: a token, a place of padding or a row that is taken for another one shows.
    told = Reference(tmp_path, trainer).told(rollouts(LOAD, seed))
    assert trainer.step(told).ratio_error == pytest.approx(0.0, abs=1e-4)


def test_it_counts_a_distance_in_either_direction(
    tmp_path: Path, trainer: Trainer, seed: int
) -> None:
    told = Reference(tmp_path, trainer).told(rollouts(LOAD, seed), shift=0.1)
    lengths = [len(row) for each in told for row in each.tokens]
    n_down = sum(n - n // 2 for n in lengths)  # told too little: the ratio is above 1
    n_up = sum(n // 2 for n in lengths)
    off = (n_down * (math.exp(0.1) - 1) + n_up * (1 - math.exp(-0.1))) / sum(lengths)
    assert trainer.step(told).ratio_error == pytest.approx(off, abs=1e-4)


def test_steps_make_better_rollouts_more_likely(
    tmp_path: Path, trainer: Trainer, seed: int
) -> None:
    told = Reference(tmp_path, trainer).told(rollouts(LOAD, seed))
    rows, _ = rows_of(told, WORDS // 2)

    def gain() -> float:
        """Logprob of each rollout by the weights for engines, as its advantage counts it."""
        now = Reference(tmp_path, trainer)
        return sum(
            row.advantage * statistics.fmean(now.logprobs(row.prompt, row.tokens)) for row in rows
        )

    before = gain()
    reports = [trainer.step(told) for _ in range(3)]
    assert gain() > before
    assert reports[0].tokens == sum(len(row) for group in told for row in group.tokens)
    assert reports[0].rollouts == LOAD.groups * LOAD.group
