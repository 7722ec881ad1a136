"""Kills one worker, once, in the middle of several rollouts."""

import asyncio
import os
import signal
from contextlib import suppress

from rolloutbus import Fleet
from rolloutbus.examples.demo_view import DemoView
from rolloutbus.examples.rollouts import RolloutFeed

MIN_MID_GENERATION = 4
"""The kill waits until the victim is in the middle of this many rollouts."""
SETTLE_S = 0.25
"""A frozen worker's last words have arrived by then; it is far shorter than a lease."""


class KillDrill:
    """What was done to whom.

    What is seen here is late, so the victim is first frozen for a closer look: what a frozen
    worker has not finished it never will.
    """

    def __init__(self, fleet: Fleet, feed: RolloutFeed, view: DemoView) -> None:
        self.victim = ""
        self.step = 0
        self.n_mid_generation = 0
        """Rollouts that the victim was in the middle of; 0 until it is dead."""
        self._fleet = fleet
        self._feed = feed
        self._view = view

    async def run(self, step: int) -> None:
        """Wait for the right moment, then strike."""
        self.victim = self._fleet.worker_names[0]
        self.step = step
        while not self.n_mid_generation:
            await self._feed.progress()
            if self._is_worth_it():
                await self._freeze_and_kill()
        self._view.say(
            f"Killed worker {self.victim} (SIGKILL), on purpose, in the middle of "
            f"{self.n_mid_generation} rollouts. They go on elsewhere; a new one will join."
        )

    def _is_worth_it(self) -> bool:
        return self._feed.n_mid_generation(self.victim) >= MIN_MID_GENERATION

    async def _freeze_and_kill(self) -> None:
        pid = self._fleet.pids[self.victim]
        if not pid:
            return  # it is being started again
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(SETTLE_S)
            if self._is_worth_it():
                self.n_mid_generation = self._feed.n_mid_generation(self.victim)
                self._fleet.kill(self.victim)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
