"""Who has an excuse: whatever a fault may have touched cannot be called healthy for a while."""

from tests.drills.simulation.virtual_time import VirtualTime
from tests.drills.simulation.weather import SimWeather

FEW = 2
"""Frames: fewer lost ones than that end no lease."""
LOSS_AFTERMATH_S = 4.0
"""A lease ends this long after frames of its heartbeats began to be lost, at the latest."""


class Health:
    """Excuses by name, and whether anything may be late."""

    def __init__(self, time: VirtualTime, weather: SimWeather) -> None:
        self.router_thaws_at = 0.0
        """When the latest long freeze of the router ends."""
        self._time, self._weather = time, weather
        self._touched: dict[str, float] = {}
        self._disturbed_until = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether anything may be late now: held up, or a second copy of something old."""
        return self._weather.climate.echoes > 0 or self._time.now < self._disturbed_until

    def touch(self, name: str, for_s: float) -> None:
        """Somebody cannot be called healthy for so long."""
        self._touched[name] = max(self._touched.get(name, 0.0), self._time.now + for_s)
        self.disturb(for_s)

    def disturb(self, for_s: float) -> None:
        """Whatever happens may be late for so long."""
        self._disturbed_until = max(self._disturbed_until, self._time.now + for_s)

    def is_touched(self, name: str, few_lost: int = FEW) -> bool:
        """Whether this process has an excuse: a fault, or so many of its frames were lost."""
        now = self._time.now
        is_unlucky = now - self._weather.lost_at(name, few_lost) < LOSS_AFTERMATH_S
        return is_unlucky or now < self._touched.get(name, 0.0)
