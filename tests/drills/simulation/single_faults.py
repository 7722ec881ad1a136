"""Every kind of fault, once, right after each message of one short run: nothing left to chance."""

import time
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tests.drills.simulation.faults import KINDS
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import SMALL
from tests.drills.simulation.world import World

SEED = 1
BEGIN_S, END_S = 2.5, 11.0
"""From the first lease to the last request: what happens in between is hit."""
AFTERWARDS_S = 1e-6


class Broken(msgspec.Struct, frozen=True):
    """A fault that the run did not survive."""

    fault: str
    at_s: float
    """Seconds from the run's start."""
    violations: list[str]


class Coverage(msgspec.Struct):
    """What all those runs showed."""

    moments: int
    """Messages after which something failed."""
    runs: int = 0
    violations: int = 0
    seconds: float = 0.0
    """CPU seconds."""
    failing: list[Broken] = []


def moments() -> list[float]:
    """When each message arrives in the run without a fault, in seconds from its start."""
    world = World(SEED, SMALL)
    start = world.time.now
    world.run()
    found = (moment - start for moment in world.time.moments)
    return [moment for moment in found if BEGIN_S < moment < END_S]


def run_single_faults(stride: int = 1, kinds: Iterable[str] = tuple(KINDS)) -> Coverage:
    """One run per kind and every `stride`-th message; each kind begins at another message."""
    began = time.process_time()
    places = moments()
    coverage = Coverage(len(places[::stride]))
    for offset, kind in enumerate(kinds):
        for moment in places[offset % stride :: stride]:
            at_s = moment + AFTERWARDS_S
            report = run_seed(SEED, replace(SMALL, fault=(kind, at_s)))
            coverage.runs += 1
            if report.violations:
                coverage.violations += len(report.violations)
                texts = [str(violation) for violation in report.violations]
                coverage.failing.append(Broken(kind, round(at_s, 6), texts))
    coverage.seconds = round(time.process_time() - began, 1)
    return coverage
