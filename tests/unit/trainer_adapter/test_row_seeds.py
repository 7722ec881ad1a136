"""Seeds of a batch: no two rows draw the same, and the same batch again draws the same."""

from collections.abc import Iterable
from typing import cast

import pytest

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.trainer_adapter.client.asks import BatchPrompt, batch_prompts, row_seed


def _seeds(prompts: list[list[int]], n: int, seed: int | None) -> list[int | None]:
    return _drawn_with(batch_prompts(prompts, SamplingParams(sampling_seed=seed), n), n)


def _drawn_with(batch: Iterable[BatchPrompt], n: int) -> list[int | None]:
    asks = [ask for prompt in batch for ask in prompt.asks(n)]
    return [cast("Generate", ask.body).sampling.sampling_seed for ask in asks]


def test_prompt_that_stands_in_a_batch_twice_is_drawn_with_two_seeds() -> None:
    assert _seeds([[1], [1], [1], [1]], 1, 40) == [40, 41, 42, 43]


def test_rows_are_counted_over_all_prompts_and_samples() -> None:
    assert _seeds([[1], [2], [1]], 2, 40) == [40, 41, 42, 43, 44, 45]
    assert _seeds([[1], [2], [1]], 2, 40) == _seeds([[1], [2], [1]], 2, 40)


def test_without_a_seed_there_is_none() -> None:
    assert _seeds([[1], [2]], 2, None) == [None] * 4


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1, 2**63 - 3])
def test_seeds_stay_int64_and_differ(seed: int) -> None:
    seeds = [row_seed(seed, row) for row in range(8)]
    assert seeds[0] == seed
    assert len({*seeds}) == len(seeds)
    assert all(-(2**63) <= each < 2**63 for each in seeds)


def test_seed_that_is_none_is_not_made_one() -> None:
    assert _seeds([[1], [2]], 1, 1 << 63) == [1 << 63] * 2, "its worker refuses it by name"


def test_a_seed_of_the_call_is_counted_as_one_of_the_sampling() -> None:
    assert _drawn_with(batch_prompts([[1], [2]], SamplingParams(), 2, 40), 2) == [40, 41, 42, 43]


def test_prompts_with_seeds_of_their_own_count_from_them() -> None:
    batch = batch_prompts([[1], [2]], SamplingParams(), 2, [7, 100])
    assert _drawn_with(batch, 2) == [7, 8, 100, 101]
    own = [SamplingParams(sampling_seed=7), {"sampling_seed": 100}]
    assert _drawn_with(batch_prompts([[1], [2]], own, 2), 2) == [7, 8, 100, 101]


def test_each_prompt_has_its_own_sampling_and_session() -> None:
    samplings = [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=5)]
    batch = batch_prompts([[1], [2]], samplings, 2, session=["a", ""])
    asks = [ask for prompt in batch for ask in prompt.asks(2)]
    bodies = [cast("Generate", ask.body) for ask in asks]
    assert [body.sampling.max_new_tokens for body in bodies] == [3, 3, 5, 5]
    assert [ask.place.session for ask in asks if ask.place] == ["a", "a", "", ""]


def test_a_batch_of_token_ids_says_what_a_batch_is() -> None:
    with pytest.raises(Refused, match=r"such as \[\[1, 2\], \[3\]\]; this is a list of") as caught:
        list(batch_prompts(cast("list[list[int]]", [1, 2]), SamplingParams(), 1))
    assert caught.value.field == "prompts"
