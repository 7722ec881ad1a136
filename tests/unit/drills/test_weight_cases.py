"""The matrix of deaths in weight updates is whole, and its beginning is spread over it."""

from collections import Counter

from tests.drills.weights.cases import N_CELLS, PAIRS, WAYS, draw_cases

WORKERS = 3


def test_the_whole_matrix_has_every_cell_once(seed: int) -> None:
    cases = draw_cases(seed, N_CELLS, WORKERS)
    assert len({case.name for case in cases}) == N_CELLS == len(PAIRS) * len(WAYS)


def test_sixty_cases_have_every_victim_in_every_phase_and_every_way(seed: int) -> None:
    cases = draw_cases(seed, 60, WORKERS)
    pairs = Counter((case.victim, case.phase) for case in cases)
    ways = Counter((case.transport, case.mode) for case in cases)
    assert min(pairs[pair] for pair in PAIRS) >= 2
    assert min(ways[way] for way in WAYS) >= 6


def test_a_single_case_can_be_repeated(seed: int) -> None:
    assert draw_cases(seed, 41, WORKERS) == draw_cases(seed, 60, WORKERS)[:41]
