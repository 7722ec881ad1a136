"""Stops an update where a drill wants it: who would bring it further is frozen or not heard.

An update of small weights is over in milliseconds; whoever wants to hit a phase of it has to make
that phase last, and hears from the trainer that it has begun.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from typing import Protocol

from rolloutbus.launcher.fleet import Fleet
from rolloutbus.launcher.plan import STORE
from tests.drills.chaos.proxy import ProxyLink
from tests.drills.weights.cases import Case
from tests.drills.weights.orders import Order, Told

STEP_TIMEOUT_S = 60.0


class Trainer(Protocol):
    """Publishes, and says how far it is."""

    def publish(self, order: Order) -> None:
        """Begin."""
        ...

    async def reached(self, is_so: Callable[[Told], bool], timeout_s: float) -> bool:
        """Wait until `is_so` of what it says. False: it has ended without."""
        ...

    async def outcome(self, timeout_s: float) -> Told:
        """Wait for the last word."""
        ...


class Gates:
    """What is shut now."""

    def __init__(self, fleet: Fleet, links: dict[str, ProxyLink]) -> None:
        """`links`: worker, or `store` -> its link to the router."""
        self._fleet = fleet
        self._links = links
        self._frozen: set[int] = set()

    async def bring_to(self, case: Case, trainer: Trainer, order: Order) -> bool:
        """Publish, and return when the update stands where it should. False: it has ended."""
        if case.phase == "active":
            trainer.publish(order)
            return (await trainer.outcome(STEP_TIMEOUT_S)).outcome == "committed"
        self._freeze(pid for name in self._workers for pid in self._fleet.host_pids(name))
        trainer.publish(order)
        if not await trainer.reached(_is_routed, STEP_TIMEOUT_S):
            return False
        match case.phase:
            case "preparing":
                if case.is_store_slow:
                    self._freeze([self._fleet.pids[STORE]])
                    self._thaw_hosts()
                return True
            case "staged":
                # All have it, and one of them is not heard.
                self._links[self._workers[case.target]].cut("up")
                self._thaw_hosts()
                n_heard = len(self._workers) - 1
                return await trainer.reached(
                    lambda told: told.n_prepared >= n_heard, STEP_TIMEOUT_S
                )
            case "recording" | "committing":
                self._links[STORE].cut("down")
                self._thaw_hosts()
                if not await trainer.reached(_is_recording, STEP_TIMEOUT_S):
                    return False
                return case.phase == "recording" or await self._bring_to_commit(case, trainer)

    def open_all(self) -> None:
        """Let everything go on; whoever died meanwhile stays dead."""
        self._thaw(list(self._frozen))
        for link in self._links.values():
            link.heal()

    async def _bring_to_commit(self, case: Case, trainer: Trainer) -> bool:
        """One worker may swap, the others are frozen before they can."""
        ahead = self._workers[case.target]
        behind = [name for name in self._workers if name != ahead]
        self._freeze(pid for name in behind for pid in self._fleet.host_pids(name))
        self._links[STORE].heal()
        return await trainer.reached(lambda told: told.n_active > 0, STEP_TIMEOUT_S)

    @property
    def _workers(self) -> list[str]:
        return self._fleet.worker_names

    def _freeze(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._frozen.add(pid)

    def _thaw_hosts(self) -> None:
        self._thaw([pid for name in self._workers for pid in self._fleet.host_pids(name)])

    def _thaw(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _is_routed(told: Told) -> bool:
    return told.phase == "preparing"


def _is_recording(told: Told) -> bool:
    return told.phase == "recording"
