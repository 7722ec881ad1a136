"""Whether the engine host is alive and getting on, and whether it may be started again."""

from collections import deque
from typing import NamedTuple

from rolloutbus.bus.wire.messages.host import EngineHeartbeat
from rolloutbus.engine_worker.settings import HostSettings


class HostEnd(NamedTuple):
    """How a host ended, and what follows from it."""

    reason: str
    """For people."""
    is_crash: bool
    """Caused by the engine or its requests; otherwise another program has killed it."""
    may_restart: bool
    words: str = ""
    """The engine's own report before it died."""

    @property
    def goodbye(self) -> str:
        """The reason for the router: a code, and after a colon what is known of the cause."""
        code = "engine_crashed" if self.is_crash else "engine_killed"
        return f"{code}: {self.words}" if self.words else code


class HostWatch:
    """Watches the progress of the running host, and remembers crashes."""

    def __init__(self, settings: HostSettings, late_tick_s: float) -> None:
        self._settings = settings
        self._late_tick_s = late_tick_s
        self._crashes: deque[float] = deque()
        self._started_at = 0.0
        self._heard_at = 0.0
        self._moved_at = 0.0
        self._ticked_at = 0.0
        self._is_ready = False
        self._n_failed_starts = 0
        self._was_in_phase = False
        self._complaint = ""
        """What the host reported about its own end."""
        self._verdict = ""
        """Why it must be killed."""
        self.heartbeat = EngineHeartbeat(0, 0, 0, 0, 0)

    def started(self, now: float) -> None:
        """A host process was started."""
        self._started_at = self._ticked_at = now
        self._is_ready = False
        self._complaint = self._verdict = ""
        self.heartbeat = EngineHeartbeat(0, 0, 0, 0, 0)

    def ready(self, now: float) -> None:
        """The host's engine is built."""
        self._is_ready = True
        self._n_failed_starts = 0
        self._heard_at = self._moved_at = now

    def spoke(self, now: float) -> None:
        """The host has sent something."""
        self._heard_at = now

    def complained(self, message: str) -> HostEnd:
        """The host has reported that its engine failed, and why; it ends soon."""
        self._complaint = message
        return HostEnd(message, is_crash=True, may_restart=True, words=message)

    def is_silent(self, now: float) -> bool:
        """Whether its process seems to be stopped: even an idle host sends heartbeats."""
        return self._is_ready and now - self._heard_at > self._settings.silent_s

    def is_given_up(self, now: float) -> bool:
        """Whether it is silent for so long that others should do its work, if it is stopped."""
        return self._is_ready and now - self._heard_at > self._settings.give_up_s

    def reported(self, heartbeat: EngineHeartbeat, now: float) -> None:
        """The host has reported its counters."""
        n_open = heartbeat.n_running + heartbeat.n_waiting
        if heartbeat.steps != self.heartbeat.steps or 0 < n_open == heartbeat.n_held:
            self._moved_at = now
        self.heartbeat = heartbeat

    def verdict(self, now: float, *, should_move: bool, in_phase: bool = False) -> str:
        """Why the host must be killed; empty while it is fine.

        `should_move`: work runs, so that steps must follow each other. `in_phase`: weights or
        memory are being moved, which has a patience of its own.
        """
        lateness_s, self._ticked_at = now - self._ticked_at, now
        if lateness_s > self._late_tick_s:
            self._forgive_our_own_pause(lateness_s)
        has_ended_phase = self._was_in_phase and not in_phase
        self._was_in_phase = in_phase
        if has_ended_phase or not (should_move or in_phase):
            self._moved_at = now
        patience_s = self._settings.phase_s if in_phase else self._settings.wedged_s
        if not self._is_ready:
            if now - self._started_at > self._settings.start_timeout_s:
                limit_s = self._settings.start_timeout_s
                self._verdict = (
                    f"the engine was not ready within {limit_s:g} s; if it needs longer, raise "
                    "start_timeout_s (--start-timeout)"
                )
        elif now - self._heard_at > patience_s:
            self._verdict = "the engine host does not answer"
        elif now - self._moved_at > patience_s:
            self._verdict = "the engine makes no progress"
        return self._verdict

    def ended(self, reason: str, now: float, *, was_killed: bool) -> HostEnd:
        """The host is gone.

        `was_killed`: by another program; its own report that its engine had failed outweighs that.
        """
        self._n_failed_starts += not self._is_ready
        self._is_ready = False
        self._crashes.append(now)
        while self._crashes[0] < now - self._settings.crash_window_s:
            self._crashes.popleft()
        n_bad = max(len(self._crashes), self._n_failed_starts)
        return HostEnd(
            self._complaint or self._verdict or reason,
            is_crash=bool(self._complaint) or not was_killed,
            may_restart=n_bad <= self._settings.max_crashes,
            words=self._complaint,
        )

    def _forgive_our_own_pause(self, lateness_s: float) -> None:
        """This process was frozen: that time says nothing about the host."""
        self._started_at += lateness_s
        self._heard_at += lateness_s
        self._moved_at += lateness_s
