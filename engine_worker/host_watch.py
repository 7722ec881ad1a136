"""Whether the engine host is alive and getting on, and whether it may be started again."""

from collections import deque

from bus.messages.host import EngineBeat
from engine_worker.settings import HostSettings


class HostWatch:
    """Progress of the running host, and the history of crashes."""

    def __init__(self, settings: HostSettings, late_tick_s: float) -> None:
        self._settings = settings
        self._late_tick_s = late_tick_s
        self._crashes: deque[float] = deque()
        self._started_at = 0.0
        self._heard_at = 0.0
        self._moved_at = 0.0
        self._ticked_at = 0.0
        self._is_ready = False
        self.beat = EngineBeat(0, 0, 0, 0, 0)

    def started(self, now: float) -> None:
        """A host process was started."""
        self._started_at = self._ticked_at = now
        self._is_ready = False
        self.beat = EngineBeat(0, 0, 0, 0, 0)

    def ready(self, now: float) -> None:
        """Its engine is built."""
        self._is_ready = True
        self._heard_at = self._moved_at = now

    def heard(self, beat: EngineBeat, now: float) -> None:
        """It reported its counters."""
        self._heard_at = now
        if beat.steps != self.beat.steps:
            self._moved_at = now
        self.beat = beat

    def verdict(self, now: float, *, should_move: bool) -> str:
        """Why the host must be killed; empty while it is fine."""
        lateness_s = now - self._ticked_at
        self._ticked_at = now
        if lateness_s > self._late_tick_s:
            # We were frozen ourselves: that time says nothing about the host.
            self._started_at += lateness_s
            self._heard_at += lateness_s
            self._moved_at += lateness_s
        if not self._is_ready:
            is_late = now - self._started_at > self._settings.start_timeout_s
            return "the engine was not ready in time" if is_late else ""
        if not should_move:
            self._moved_at = now
        if now - self._moved_at > self._settings.wedged_s:
            return "the engine makes no progress"
        if now - self._heard_at > self._settings.wedged_s:
            return "the engine host does not answer"
        return ""

    def crashed(self, now: float) -> bool:
        """The host is gone; whether another may be started."""
        self._is_ready = False
        self._crashes.append(now)
        while self._crashes[0] < now - self._settings.crash_window_s:
            self._crashes.popleft()
        return len(self._crashes) <= self._settings.max_crashes
