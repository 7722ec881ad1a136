"""Many seeds in a row, in one process or several, and what they showed together."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from tests.drills.simulation.mutants import MUTANTS, SCENARIOS
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import SWARM, Scenario
from tests.drills.simulation.story import Story
from tests.drills.simulation.verdict import SOMETIMES, Report

MAX_EXECUTIONS_PER_REQUEST = 1.6
STORIES = 5
"""Failing seeds whose story is told."""
TOLD_RIDS = 2
STORY_LINES = 80
COLLECT_EVERY = 4
"""Seeds: what they leave behind fits into a cache, and is worth a look."""
ENOUGH = 10
"""A mutant found in so many seeds needs no further ones."""


class Failure(msgspec.Struct, frozen=True):
    """A seed that broke an oracle."""

    seed: int
    violations: list[str]
    story: list[str] = []
    """Faults, and what was said about the first broken requests; empty after the first few."""


class Summary(msgspec.Struct):
    """What a row of seeds showed."""

    start: int
    seeds: int
    violations: int = 0
    requests: int = 0
    executions: int = 0
    executions_per_request: float = 0.0
    seconds: float = 0.0
    """CPU seconds, all processes together."""
    sometimes: dict[str, int] = {}
    never_seen: list[str] = []
    """Events of SOMETIMES that no seed has shown."""
    failing_seeds: list[Failure] = []

    @property
    def has_passed(self) -> bool:
        """Whether nothing was violated, nothing wasted, and every protection was needed."""
        is_thrifty = self.executions_per_request <= MAX_EXECUTIONS_PER_REQUEST
        return not self.violations and not self.never_seen and is_thrifty


class Detection(msgspec.Struct, frozen=True):
    """How a mutant was found."""

    mutant: str
    found_in: int
    seeds: int
    first_seed: int | None
    oracles: dict[str, int]
    """Oracle -> seeds in which it spoke up."""
    executions_per_request: float


def run_seeds(start: int, count: int, scenario: Scenario = SWARM) -> Summary:
    """Seeds [start, start + count) in this process."""
    began = time.process_time()
    summary = Summary(start, count)
    gc.freeze()  # what was imported is not looked at again and again
    for seed in range(start, start + count):
        _add(summary, run_seed(seed, scenario), scenario)
        if seed % COLLECT_EVERY == 0:
            gc.collect()
    summary.seconds = time.process_time() - began
    return _finished(summary)


def run_parallel(start: int, count: int, jobs: int) -> Summary:
    """The same in several processes.

    Raises:
        RuntimeError: one of them failed.
    """
    bounds = [start + count * i // jobs for i in range(jobs + 1)]
    ranges = [(low, high - low) for low, high in pairwise(bounds) if high > low]
    command = [sys.executable, "-m", "tests.drills.simulation.share"]
    processes = [
        subprocess.Popen([*command, str(low), str(size)], stdout=subprocess.PIPE)
        for low, size in ranges
    ]
    total = Summary(start, count)
    try:
        for process in processes:
            output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a simulation process ended with status {process.returncode}")
            _merge(total, msgspec.json.decode(output, type=Summary))
    finally:
        for process in processes:
            process.kill()
    return _finished(total)


def tell(seed: int) -> list[str]:
    """The story of one seed: its faults, and the requests that broke an oracle."""
    return _story(run_seed(seed), SWARM)


def detect(mutant: str, seeds: Iterable[int], enough: int = ENOUGH) -> Detection:
    """Run a mutant over some seeds, until `enough` of them have found it."""
    scenario = SCENARIOS.get(mutant, SWARM)
    oracles: dict[str, int] = {}
    found: list[int] = []
    n_seeds = n_requests = n_executions = 0
    for seed in seeds:
        report = run_seed(seed, scenario, MUTANTS[mutant])
        n_seeds += 1
        n_requests += report.n_requests
        n_executions += report.n_executions
        if report.violations:
            found.append(seed)
        for oracle in {violation.oracle for violation in report.violations}:
            oracles[oracle] = oracles.get(oracle, 0) + 1
        if len(found) >= enough:
            break
    ratio = n_executions / max(1, n_requests)
    first = found[0] if found else None
    return Detection(mutant, len(found), n_seeds, first, oracles, round(ratio, 3))


def _add(summary: Summary, report: Report, scenario: Scenario) -> None:
    summary.requests += report.n_requests
    summary.executions += report.n_executions
    for event, count in report.sometimes.items():
        summary.sometimes[event] = summary.sometimes.get(event, 0) + count
    if report.violations:
        summary.violations += len(report.violations)
        is_told = len(summary.failing_seeds) < STORIES
        story = _story(report, scenario) if is_told else []
        texts = [str(violation) for violation in report.violations]
        summary.failing_seeds.append(Failure(report.seed, texts, story))


def _merge(total: Summary, part: Summary) -> None:
    total.violations += part.violations
    total.requests += part.requests
    total.executions += part.executions
    total.seconds += part.seconds
    for event, count in part.sometimes.items():
        total.sometimes[event] = total.sometimes.get(event, 0) + count
    total.failing_seeds.extend(part.failing_seeds)


def _finished(summary: Summary) -> Summary:
    summary.seconds = round(summary.seconds, 1)
    ratio = summary.executions / max(1, summary.requests)
    summary.executions_per_request = round(ratio, 3)
    summary.sometimes = dict(sorted(summary.sometimes.items()))
    summary.never_seen = [event for event in SOMETIMES if not summary.sometimes.get(event)]
    return summary


def _story(report: Report, scenario: Scenario) -> list[str]:
    rids = dict.fromkeys(each.rid for each in report.violations if "/" in each.rid)
    story = Story(list(rids)[:TOLD_RIDS])
    run_seed(report.seed, scenario, story=story)
    return story.lines[:STORY_LINES]
