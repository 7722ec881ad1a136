import random

import numpy as np
import pytest

from rolloutbus.examples.task import (
    ALPHABET,
    VOCABULARY,
    WORD_LETTERS,
    answer_tokens,
    as_text,
    best_constant_reward,
    draw_words,
    prompt_tokens,
    reward,
    token_rewards,
)


def test_prompt_is_start_word_and_equals_sign() -> None:
    assert as_text(prompt_tokens("padlock")) == "<s>padlock="


def test_answer_moves_each_letter_on_and_wraps_around() -> None:
    assert as_text(answer_tokens("padlock")) == "abempdl"


def test_each_letter_is_judged_at_its_own_place() -> None:
    tokens = answer_tokens("abcd")
    tokens[2] = VOCABULARY.index("=")

    assert token_rewards("abcd", tokens).tolist() == [1, 1, 0, 1]
    assert reward("abcd", tokens) == 0.75


@pytest.mark.parametrize("n_tokens", [0, 2, 6])
def test_missing_letters_earn_nothing_and_extra_ones_nothing_more(n_tokens: int) -> None:
    tokens = np.resize(answer_tokens("abcd"), n_tokens)

    assert reward("abcd", tokens) == min(n_tokens, 4) / 4


def test_drawn_words_differ_and_leave_out_what_is_to_be_avoided(seed: int) -> None:
    held_out = draw_words(random.Random(seed), 100)
    words = draw_words(random.Random(seed), 100, avoid=held_out)

    assert len(set(held_out)) == 100
    assert not set(words) & set(held_out)
    assert {len(word) for word in words} == {WORD_LETTERS}
    assert set("".join(words)) <= set(ALPHABET)


def test_best_constant_answer_cannot_be_beaten_by_any_other_constant_answer(seed: int) -> None:
    rng = random.Random(seed)
    words = draw_words(rng, 20)
    bound = best_constant_reward(words)

    for _ in range(200):
        answer = answer_tokens(draw_words(rng, 1)[0])
        assert np.mean([reward(word, answer) for word in words]) <= bound + 1e-6


def test_best_constant_answer_counts_the_most_frequent_right_letter_of_each_place() -> None:
    assert best_constant_reward(["aa", "ab", "cb"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("run_seed", [0, 1, 2])
def test_constant_answers_earn_little_on_as_many_words_as_the_demo_holds_out(run_seed: int) -> None:
    held_out = draw_words(random.Random(run_seed), 100)

    assert best_constant_reward(held_out) <= 0.3


def test_right_answers_differ_from_prompt_to_prompt(seed: int) -> None:
    words = draw_words(random.Random(seed), 50)

    assert len({answer_tokens(word).tobytes() for word in words}) == len(words)
