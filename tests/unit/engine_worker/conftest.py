"""A worker core on a bench: fresh, and with its engine ready and its lease held; a step log."""

from collections.abc import Iterator

import pytest

from tests.step_log import StepLog
from tests.unit.engine_worker.core_bench import Bench


@pytest.fixture
def new() -> Bench:
    return Bench()


@pytest.fixture
def bench(new: Bench) -> Bench:
    new.join()
    return new


@pytest.fixture
def log() -> Iterator[StepLog]:
    with StepLog() as log:
        yield log
