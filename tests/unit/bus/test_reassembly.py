"""An assembly holds exactly the contiguous tokens it was given, in whatever order they came."""

import random

import pytest

from rolloutbus.bus.streams.reassembly import Assembly, GapTracker, Row, cut_runs, first_difference
from tests.unit.trainer_adapter.bench import ints, logprobs_of


def row(start: int, *tokens: int, version: int = 0) -> Row:
    return Row(start, ints(*tokens), logprobs_of(*tokens), [(version, len(tokens))])


@pytest.mark.parametrize("n_round", range(50))
def test_rows_cut_shuffled_and_repeated_give_the_same_tokens(
    rng: random.Random, n_round: int
) -> None:
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
    versions = sorted(rng.randrange(3) for _ in tokens)
    rows: list[Row] = []
    at = 0
    while at < len(tokens):
        end = min(len(tokens), at + rng.randrange(1, 6))
        end = next((i for i in range(at, end) if versions[i] != versions[at]), end)
        rows.append(row(at, *tokens[at:end], version=versions[at]))
        at = end
    rows += rng.sample(rows, k=len(rows) // 2)
    rng.shuffle(rows)
    assembly = Assembly()
    for each in rows:
        assembly.add(each)
    prefix = assembly.prefix()
    assert prefix.tokens == ints(*tokens), n_round
    assert prefix.logprobs == logprobs_of(*tokens)
    assert [version for version, n in prefix.versions for _ in range(n)] == versions
    assert assembly.gap is None


def test_a_gap_holds_back_what_follows() -> None:
    assembly = Assembly()
    assert assembly.add(row(0, 1))
    assert not assembly.add(row(2, 3))
    assert (assembly.n_tokens, assembly.gap) == (1, (1, 2))
    assert assembly.add(row(1, 2))
    assert (assembly.n_tokens, assembly.gap) == (3, None)


def test_a_row_that_contradicts_what_is_held_voids_it_from_there() -> None:
    assembly = Assembly()
    assembly.add(row(0, 1, 2, 3))
    assembly.read()
    assembly.add(row(1, 2, 9))
    assert assembly.prefix().tokens == ints(1, 2, 9)
    assert [(each.start, each.tokens) for each in assembly.read()] == [(2, ints(9))]


def test_a_new_attempt_forgets_what_lies_beyond_its_base() -> None:
    assembly = Assembly()
    assembly.add(row(0, 1, 2, version=1))
    assembly.add(row(2, 3, version=2))
    assembly.begin(1)
    assert assembly.prefix().versions == [(1, 1)]
    assembly.begin(5)
    assert assembly.n_tokens == 1


def test_behaviour_logprobs_default_to_logprobs_once_any_row_has_them() -> None:
    assembly = Assembly()
    assembly.add(row(0, 1))
    assert assembly.prefix().behaviour_logprobs == b""
    assembly.add(row(1, 2)._replace(behaviour_logprobs=logprobs_of(50)))
    assert assembly.prefix().behaviour_logprobs == logprobs_of(1, 50)


def test_numbers_that_are_passed_over_are_told_once() -> None:
    numbers = GapTracker(5)
    assert numbers.pass_over(5, 7) is None
    assert numbers.pass_over(6, 7) is None  # a copy
    numbers.heard(9)
    assert numbers.gap == (7, 9)
    assert numbers.pass_over(10, 11) == (7, 10)
    assert (numbers.next, numbers.gap) == (11, None)


def test_a_gap_that_is_given_up_is_a_hole_that_no_row_goes_over() -> None:
    assembly = Assembly()
    assembly.add(row(0, 1, 2))
    assembly.add(row(5, 6, 7))
    assembly.heard(9)
    assert assembly.give_up() == (2, 5)
    assert (assembly.next, assembly.n_tokens, assembly.n_lost) == (7, 4, 3)
    assert assembly.gap == (7, 9)
    assembly.add(row(3, 4, 5, 6, 8, 9))  # it begins within the hole, and contradicts
    assert [(each.start, each.tokens) for each in assembly.read()] == [
        (0, ints(1, 2)),
        (5, ints(6, 8, 9)),
    ]
    assert assembly.prefix().tokens == ints(1, 2, 6, 8, 9)
    assert assembly.give_up() == (8, 9)
    assert assembly.give_up() is None
    assembly.begin(0)
    assert (assembly.next, assembly.n_lost, assembly.prefix().tokens) == (0, 0, b"")


def test_tokens_of_an_earlier_attempt_are_doubted_until_all_are_told_again() -> None:
    assembly = Assembly()
    assembly.add(row(0, 1, 2, 3))
    assembly.read()
    assembly.doubt()
    assert assembly.gap is None
    assert not assembly.add(row(2, 8))
    assert assembly.gap == (0, 2)
    assembly.repaired(row(0, 1, 7))
    assert assembly.gap is None
    assert [(each.start, each.tokens) for each in assembly.read()] == [(1, ints(7, 8))]


def test_runs_are_cut_at_token_positions() -> None:
    runs = [(1, 3), (2, 2)]
    assert cut_runs(runs, 0, 5) == runs
    assert cut_runs(runs, 2, 4) == [(1, 1), (2, 1)]
    assert cut_runs(runs, 3, 3) == []


@pytest.mark.parametrize("at", range(6))
def test_the_first_difference_is_found(at: int) -> None:
    left = [1, 2, 3, 4, 5]
    right = [*left[:at], *(token + 1 for token in left[at:])]
    assert first_difference(ints(*left), ints(*right)) == at
