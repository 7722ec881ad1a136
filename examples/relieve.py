"""Workers that are much slower than the others leave, and what they run goes on elsewhere.

A trainer that bounds the staleness of its samples waits for the slowest one: a GPU that is hot or
shared holds all others up. Run it with `python -m rolloutbus.examples.relieve ADDRESS`, with
`--watch` to be told only. The rule is in `SlowWatch`, and knows nothing of how workers are started.
"""

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import rolloutbus
from rolloutbus import RolloutClient
from rolloutbus.errors import BusError
from rolloutbus.types import FleetStatus


class Rule(NamedTuple):
    """When a worker is too slow."""

    factor: float = 2.0
    """The others take so many times as many steps in the same time."""
    patience: int = 3
    """Looks in a row that must find it so: one slow look may be a long prompt."""
    look_s: float = 5.0
    """Between two looks."""
    others: int = 2
    """Workers that it is compared with, at least; so many always stay."""


class Pace(NamedTuple):
    """What one worker did between two looks."""

    name: str
    steps_per_s: float
    n_running: int
    """The least at both looks."""


class SlowWatch:
    """Finds the workers that were too slow at each of the last looks."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._n_slow: dict[str, int] = {}
        """Worker -> looks in a row that found it slow."""

    def look(self, paces: Sequence[Pace]) -> list[str]:
        """Their names, the slowest first; `paces` are of workers with the same model."""
        busy = [each for each in paces if each.n_running]
        slow = [each for each in busy if self._is_slow(each, busy)]
        self._n_slow = {each.name: self._n_slow.get(each.name, 0) + 1 for each in slow}
        slow.sort(key=lambda each: each.steps_per_s)
        return [each.name for each in slow if self._n_slow[each.name] >= self._rule.patience]

    def _is_slow(self, pace: Pace, busy: Sequence[Pace]) -> bool:
        """By what the others would do with its load.

        Requests gather at a slow worker, and with four times as many a step may take twice as
        long: one H200 with a model of 7B takes that from 64 to 256, and less from 16 to 64.
        """
        others = [
            each.steps_per_s / math.sqrt(max(1.0, pace.n_running / each.n_running))
            for each in busy
            if each.name != pace.name
        ]
        if len(others) < self._rule.others:
            return False
        return pace.steps_per_s * self._rule.factor < statistics.median(others)


def paces_of(before: FleetStatus, after: FleetStatus, seconds: float) -> dict[str, list[Pace]]:
    """Policy -> what its workers did, for those that served all the time and were heard of."""
    former = {each.epoch: each for each in before.workers}
    paces: dict[str, list[Pace]] = {}
    for worker in after.workers:
        known = former.get(worker.epoch)
        if known is None or worker.blocked_by or known.blocked_by:
            continue
        # Steps are as of the last heartbeat.
        passed_s = seconds - (worker.beat_age_ms - known.beat_age_ms) / 1000
        if passed_s < seconds / 2:
            continue
        n_running = min(worker.n_running, known.n_running)
        pace = Pace(worker.name, (worker.steps - known.steps) / passed_s, n_running)
        paces.setdefault(worker.policy, []).append(pace)
    return paces


async def follow(
    client: RolloutClient, rule: Rule, tell: Callable[[str], None] = print, *, acts: bool = True
) -> None:
    """Have slow workers leave, one at each look, until cancelled; `acts=False` only tells."""
    watches: dict[str, SlowWatch] = {}
    before, looked_at = await client.status(), time.monotonic()
    while True:
        await asyncio.sleep(rule.look_s)
        after, now = await client.status(), time.monotonic()
        for policy, paces in paces_of(before, after, now - looked_at).items():
            slow = watches.setdefault(policy, SlowWatch(rule)).look(paces)
            if slow:
                await _relieve(client, slow[0], paces, tell, acts=acts)
        before, looked_at = after, now


async def _relieve(
    client: RolloutClient,
    name: str,
    paces: Sequence[Pace],
    tell: Callable[[str], None],
    *,
    acts: bool,
) -> None:
    own = next(each.steps_per_s for each in paces if each.name == name)
    usual = statistics.median(each.steps_per_s for each in paces if each.name != name)
    tell(f"{name} takes {own:.1f} steps/s, the others {usual:.1f}")
    if not acts:
        return
    try:
        # Without draining: its clients go on elsewhere, with the tokens that they have.
        await client.shutdown_worker(name, drain=False)
    except BusError as error:  # it has gone by itself, or does not answer: the next look tells
        tell(f"{name} could not be told to leave: {error}")


async def main() -> None:
    """Watch a fleet until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Have workers leave that are much too slow")
    parser.add_argument("address", help="of the router, as `rolloutbus up` prints it")
    parser.add_argument("--watch", action="store_true", help="only tell of them")
    parser.add_argument("--factor", type=_factor, default=Rule().factor, help="above 1")
    options = parser.parse_args()
    async with rolloutbus.connect(options.address) as client:
        await follow(client, Rule(factor=options.factor), acts=not options.watch)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 1, not {text!r}")
    return value


if __name__ == "__main__":
    asyncio.run(main())
