"""The demo's task: write a word again with each of its letters moved on by one place.

`padlock…` would be answered by `abempdl…`: the alphabet has sixteen letters, `a` to `p`, and wraps
around. A model that starts from random weights has to find out, from rewards alone, that letter i
of the answer depends on letter i of the prompt, and in which way. Each right letter earns its
share, so the first lucky guesses already count. No fixed answer is good for more than one prompt.
"""

from collections.abc import Collection, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

ALPHABET = "abcdefghijklmnop"
WORD_LETTERS = 24
"""Letters in each word, and tokens in each answer."""
VOCABULARY = ("<pad>", "<s>", "=", *ALPHABET)
"""Token id -> text. A prompt is `<s>`, the word, `=`."""

_TOKEN_IDS = {text: token for token, text in enumerate(VOCABULARY)}


def draw_words(rng: Random, n: int, avoid: Collection[str] = ()) -> list[str]:
    """Draw `n` different words, none of them in `avoid`."""
    words: dict[str, None] = {}
    while len(words) < n:
        word = "".join(rng.choices(ALPHABET, k=WORD_LETTERS))
        if word not in avoid:
            words[word] = None
    return list(words)


def prompt_tokens(word: str) -> list[int]:
    """Token ids of the prompt that asks for `word`."""
    return [_TOKEN_IDS[text] for text in ("<s>", *word, "=")]


def answer_tokens(word: str) -> NDArray[np.int32]:
    """int32 [len(word)]: the right answer."""
    moved = (ALPHABET[(ALPHABET.index(letter) + 1) % len(ALPHABET)] for letter in word)
    return np.array([_TOKEN_IDS[letter] for letter in moved], dtype=np.int32)


def as_text(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """What a person reads in `tokens`."""
    return "".join(VOCABULARY[token] for token in tokens)


def token_rewards(word: str, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """float32 [len(word)]: 1 where the sampled letter is right; 0 where it is wrong or missing."""
    rewards = np.zeros(len(word), dtype=np.float32)
    n = min(len(tokens), len(word))
    rewards[:n] = tokens[:n] == answer_tokens(word)[:n]
    return rewards


def reward(word: str, tokens: NDArray[np.int32]) -> float:
    """Share of the letters that are right: 0 to 1."""
    return float(token_rewards(word, tokens).mean())


def best_constant_reward(words: Sequence[str]) -> float:
    """Mean reward over `words` of the best answer that does not look at the prompt.

    Positions are scored apart, so the best constant answer has at each position the letter that
    is right for most of the words. It is chosen with hindsight: an upper bound.
    """
    answers = np.stack([answer_tokens(word) for word in words])
    right_at_best = [np.unique(column, return_counts=True)[1].max() for column in answers.T]
    return float(np.mean(right_at_best) / len(words))
