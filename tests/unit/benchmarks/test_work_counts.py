"""The hot paths do no more work than their committed baseline says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from benchmarks.core_paths import Meter
from benchmarks.work_counts import (
    MARGIN,
    PYTHON,
    SEED,
    Bytecodes,
    Counts,
    complaints,
    read_baseline,
    router_batched,
)

P = ParamSpec("P")
R = TypeVar("R")
ROOT = Path(__file__).resolve().parents[3]


def _spend(n: int) -> None:
    """A loop takes three bytecodes each time it goes round."""
    for _ in range(n // 3):
        pass


class Slowed:
    """A meter of functions that do a fifth more than they have to."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    @property
    def total(self) -> int:
        return self.meter.total

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        before = self.meter.total
        found = self.meter.run(function, *args, **kwargs)
        self.meter.run(_spend, (self.meter.total - before) // 5)
        return found


@pytest.mark.timeout(900)
def test_no_hot_path_does_more_than_its_baseline_says() -> None:
    baseline = read_baseline()
    if baseline is None:
        pytest.skip(f"nothing is committed for CPython {PYTHON}; `make baseline` does that")
    command = [sys.executable, "-m", "benchmarks.work_counts", "--json"]
    env = {**os.environ, "PYTHONHASHSEED": SEED, "PYTHONPATH": str(ROOT)}
    found = json.loads(subprocess.check_output(command, cwd=ROOT, env=env, timeout=800))
    told = complaints(found, baseline)
    advice = "If it is worth that, `make baseline`, and say in the commit why:"
    assert not told, "\n".join([advice, *told])


def test_a_router_that_is_a_fifth_slower_is_noticed() -> None:
    before: Counts = {"router": router_batched(Bytecodes())}
    again: Counts = {"router": router_batched(Bytecodes())}
    slower: Counts = {"router": router_batched(Slowed(Bytecodes()))}
    assert complaints(again, before) == []
    assert len(complaints(slower, before)) == 1
    assert slower["router"] == pytest.approx(1.2 * before["router"], rel=0.03)


def test_the_margin_is_a_tenth_and_less_work_is_welcome() -> None:
    assert MARGIN == 0.1
    assert complaints({"a": 109, "b": 50}, {"a": 100, "b": 100}) == []
    assert complaints({"a": 111}, {"a": 100}) == ["a was 100 and is 111 (+11%)"]


def test_a_path_without_its_counterpart_is_named() -> None:
    told = complaints({"new": 1.0}, {"gone": 1.0})
    assert told == ["gone is in the baseline but is not counted", "new has no baseline"]
