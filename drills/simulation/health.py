"""Who has an excuse: whatever a fault may have touched cannot be called healthy for a while."""

from bus.testing import VirtualTime
from drills.simulation.weather import Climate


class Health:
    """Excuses by name, and whether anything may be late."""

    def __init__(self, time: VirtualTime, climate: Climate) -> None:
        self.router_thaws_at = 0.0
        """When the latest long freeze of the router ends."""
        self.split_until = 0.0
        """Two routers may be obeyed until then."""
        self._time, self._climate = time, climate
        self._touched: dict[str, float] = {}
        self._disturbed_until = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether anything may be late now."""
        climate = self._climate
        is_rough = climate.loss > 0 or climate.echoes > 0
        return is_rough or self._time.now < self._disturbed_until

    def touch(self, name: str, for_s: float) -> None:
        """Somebody cannot be called healthy for so long."""
        self._touched[name] = max(self._touched.get(name, 0.0), self._time.now + for_s)
        self.disturb(for_s)

    def disturb(self, for_s: float) -> None:
        """Whatever happens may be late for so long."""
        self._disturbed_until = max(self._disturbed_until, self._time.now + for_s)

    def is_touched(self, name: str) -> bool:
        """Whether this process has an excuse."""
        return self._climate.loss > 0 or self._time.now < self._touched.get(name, 0.0)
