"""A welcomed client core for each test."""

import pytest

from tests.unit.trainer_adapter.bench import Bench


@pytest.fixture
def bench(seed: int) -> Bench:
    bench = Bench(seed)
    bench.welcome()
    bench.sent.clear()
    return bench
