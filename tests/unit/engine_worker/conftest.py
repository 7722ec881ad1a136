"""A worker core on a bench: fresh, and with its engine ready and its lease held."""

import pytest

from tests.unit.engine_worker.core_bench import Bench


@pytest.fixture
def new() -> Bench:
    return Bench()


@pytest.fixture
def bench(new: Bench) -> Bench:
    new.join()
    return new
