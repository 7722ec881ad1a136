"""Engines on tiny models; apart from their siblings, who need no torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.step_log import StepLog
from tests.tiny_models import Build, engines, save_models


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def build(log: StepLog, paths: dict[str, Path]) -> Iterator[Build]:
    with engines(log, paths) as build:
        yield build
