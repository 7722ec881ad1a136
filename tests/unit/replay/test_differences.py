"""What differs from a recording is told with its place and its size."""

import math

import numpy as np
import pytest

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.messages.generation import Generate, Generated, SamplingParams
from rolloutbus.replay.regenerating import Again, difference, first_difference, max_delta, summary
from rolloutbus.replay.trajectories import Answered
from tests.unit.replay.streams import floats, ints


def recorded(sampling: SamplingParams | None = None) -> Answered:
    result = Generated(ints(5, 6, 7), floats(-1, -2, -3), [(1, 3)], "stop", 0, 2)
    generate = Generate(ints(3), sampling or SamplingParams(sampling_seed=4))
    return Answered("c/1", generate, Placement("p"), result)


def again(*tokens: int, logprobs: tuple[float, ...] = (-1, -2, -3), why: str = "stop") -> Again:
    return Again(
        np.array(tokens, "<i4"), np.array(logprobs[: len(tokens)], "<f4"), [(2, len(tokens))], why
    )


def test_the_same_tokens_and_logprobs_are_equal() -> None:
    found = difference(recorded(), again(5, 6, 7))
    assert (found.is_equal, found.first, found.max_logprob_delta) == (True, None, 0.0)
    assert (found.versions_recorded, found.versions_again) == ([(1, 3)], [(2, 3)])


def test_another_token_is_told_with_its_index_and_logprobs_count_up_to_it() -> None:
    found = difference(recorded(), again(5, 6, 9, logprobs=(-1, -2.25, -9)))
    assert (found.is_equal, found.first, found.max_logprob_delta) == (False, 2, 0.25)


@pytest.mark.parametrize("tokens", [(5, 6), (5, 6, 7, 8)])
def test_a_shorter_or_longer_one_differs_where_the_first_of_them_ends(
    tokens: tuple[int, ...],
) -> None:
    found = difference(recorded(), again(*tokens, logprobs=(-1, -2, -3, -4)))
    assert (found.is_equal, found.first) == (False, min(len(tokens), 3))


def test_logprobs_may_differ_as_far_as_is_tolerated() -> None:
    near = again(5, 6, 7, logprobs=(-1, -2, -3.125))
    assert difference(recorded(), near, tolerance=0.125).is_equal
    assert not difference(recorded(), near, tolerance=0.1).is_equal


def test_another_reason_to_end_is_a_difference() -> None:
    assert not difference(recorded(), again(5, 6, 7, why="length")).is_equal


def test_what_could_not_be_sampled_again_is_told_why() -> None:
    found = difference(recorded(), "no worker had the weights")
    assert (found.is_equal, found.problem) == (False, "no worker had the weights")


def test_only_seeded_and_greedy_ones_can_be_expected_to_be_equal() -> None:
    given = (SamplingParams(sampling_seed=1), SamplingParams(temperature=0.0), SamplingParams())
    found = [difference(recorded(each), again(5, 6, 7)).is_reproducible for each in given]
    assert found == [True, True, False]


def test_the_summary_counts_each_request_once() -> None:
    found = [
        difference(recorded(), again(5, 6, 7)),
        difference(recorded(), again(5, 9, 7, logprobs=(-1.5, 0, 0))),
        difference(recorded(), "refused"),
    ]
    assert summary(found) == {
        "requests": 3,
        "equal": 1,
        "different": 1,
        "failed": 1,
        "not_reproducible": 0,
        "max_logprob_delta": 0.5,
    }


def test_infinities_that_are_equal_differ_by_nothing_and_any_other_by_infinity() -> None:
    low = np.array([-math.inf, -1.0], np.float32)
    assert max_delta(low, low) == 0.0
    assert max_delta(low, np.array([-2.0, -1.0], np.float32)) == math.inf
    assert max_delta(low, np.array([math.nan, -1.0], np.float32)) == math.inf
    assert max_delta(low[:0], low[:0]) == 0.0


def test_the_first_difference_of_equal_tokens_is_nowhere() -> None:
    some = np.array([1, 2], np.int32)
    assert first_difference(some, some) is None
    assert first_difference(some[:0], some[:0]) is None
