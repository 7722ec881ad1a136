"""What both loops of `benchmarks/gpu/rl_loop.py` train on, and that they do train."""

from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.rl_training import Load, Sampled, Trainer, asked, micro_batches, rows_of
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
    micro_tokens=128,
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


def test_steps_make_better_rollouts_more_likely(tmp_path: Path, seed: int) -> None:
    write_shape(tmp_path, "tiny")
    trainer = Trainer(tmp_path, LOAD)
    groups = rollouts(LOAD, seed)
    rows, _ = rows_of(groups, WORDS // 2)

    def gain() -> float:
        """Logprob of each rollout by the weights for engines, as its advantage counts it."""
        config = cast("Any", AutoConfig).from_pretrained(tmp_path)
        model = cast("Any", AutoModelForCausalLM).from_config(config)
        model.load_state_dict(trainer.weights())
        total = 0.0
        with torch.no_grad():
            for row in rows:
                logits = model(torch.tensor([[*row.prompt, *row.tokens]])).logits[0]
                found = logits.log_softmax(-1)[len(row.prompt) - 1 : -1]
                total += row.advantage * float(found[range(len(row.tokens)), row.tokens].mean())
        return total

    before = gain()
    reports = [trainer.step(groups) for _ in range(3)]
    assert gain() > before
    assert reports[0].tokens == sum(len(row) for group in groups for row in group.tokens)
    assert reports[0].rollouts == LOAD.groups * LOAD.group
