"""The circuit breaker of a worker: after too many failures it is left alone, then tried once.

Only failures of transport and engine count: what a request itself did wrong says nothing about
its worker.
"""

from collections import deque
from typing import Literal

import msgspec

from rolloutbus.bus.actor.effects import next_state

BreakerState = Literal["closed", "open", "trying"]

BREAKER_LIFE: dict[BreakerState, dict[str, BreakerState]] = {
    # serves; failures are counted
    "closed": {"tripped": "open"},
    # gets nothing until its time is over
    "open": {"failed": "open", "waited": "trying"},
    # gets one request at a time, the probe
    "trying": {"failed": "open", "recovered": "closed"},
}


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker is left alone, and for how long."""

    n_failures: int = 5
    window_s: float = 30.0
    open_s: float = 10.0
    n_successes: int = 2


class Breaker:
    """Of one worker name; outlives the worker's leases."""

    def __init__(self, name: str, settings: BreakerSettings) -> None:
        self.name = name
        self._settings = settings
        self.state: BreakerState = "closed"
        self.probe = ""
        """rid of the request that is the probe now; empty: none is under way."""
        self._failed_at: deque[float] = deque(maxlen=settings.n_failures)
        self._opened_at = 0.0
        self.failed_at = 0.0
        self._n_successes = 0
        self.blamed_version: int | None = None
        """The weights that it had at the last failure, if all were due to weights."""

    @property
    def is_idle(self) -> bool:
        """Closed, and no failure is remembered."""
        return self.state == "closed" and not self._failed_at

    @property
    def takes_requests(self) -> bool:
        """Whether a request may go to the worker now."""
        return self.state == "closed" or (self.state == "trying" and not self.probe)

    def failed(self, now: float, *, is_final: bool = False, version: int | None = None) -> bool:
        """A failure; True if it is left alone from now on and was not before.

        A final one, of a worker that gives itself up, needs no others to open it. `version`: the
        weights that it is due to, as far as the worker has told.
        """
        if self.is_idle or self.blamed_version is not None:
            self.blamed_version = version
        self.failed_at = now
        self._failed_at.append(now)
        self._drop_old(now)
        if self.state == "closed":
            if not is_final and len(self._failed_at) < self._settings.n_failures:
                return False
            self._advance("tripped")
        elif self.state == "trying":
            self._advance("failed")
        else:
            return False
        self._opened_at = now
        self.probe = ""
        return True

    def probe_succeeded(self) -> None:
        """The probe came back well."""
        self.probe = ""
        self._n_successes += 1
        if self._n_successes >= self._settings.n_successes:
            self._advance("recovered")
            self._failed_at.clear()

    def tick(self, now: float) -> bool:
        """Time passes; True if it may be tried from now on."""
        self._drop_old(now)
        if self.state == "open" and now - self._opened_at >= self._settings.open_s:
            self._advance("waited")
            self._n_successes = 0
            return True
        return False

    def _drop_old(self, now: float) -> None:
        while self._failed_at and self._failed_at[0] <= now - self._settings.window_s:
            self._failed_at.popleft()

    def _advance(self, event: str) -> None:
        self.state = next_state(BREAKER_LIFE, self.state, event, f"breaker of {self.name}")
