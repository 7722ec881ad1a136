"""The simulated network's moods: latency, cuts in one or both directions, losses, second copies."""

from dataclasses import dataclass
from random import Random

from tests.drills.simulation.memory_ports import BREAK_AFTER_S, LOST
from tests.drills.simulation.process import ROUTERS
from tests.drills.simulation.virtual_time import VirtualTime

MAX_ECHO_S = 8.0
EVERYBODY = "*"


@dataclass(slots=True)
class Climate:
    """What one seed's network is like until the faults stop."""

    latency_s: float = 0.001
    publish_loss: float = 0.0
    loss: float = 0.0
    """Share of frames dropped although their link stays: full queues, a router's lost memory."""
    echoes: float = 0.0
    """Share of frames that arrive a second time, after what was sent later, or even on the next
    connection."""

    @classmethod
    def drawn(cls, chance: Random) -> "Climate":
        """Each seed has its own."""
        return cls(
            latency_s=chance.choice([0.0002, 0.001, 0.01, 0.05]),
            publish_loss=chance.choice([0.0, 0.0, 0.02, 0.1]),
            loss=chance.choice([0.0, 0.0, 0.0, 0.01, 0.03]),
            echoes=chance.choice([0.0, 0.0, 0.0, 0.02, 0.1]),
        )


class SimWeather:
    """Delays, cuts and losses, drawn from one seeded source."""

    def __init__(self, time: VirtualTime, climate: Climate) -> None:
        self.climate = climate
        self._time = time
        self._random = time.chance("weather").random
        self._chance = time.chance("cuts")
        self._cuts: dict[tuple[str, str], float] = {}
        self._worst_until = 0.0
        self._lost_at: dict[str, list[float]] = {}

    def calm_down(self) -> None:
        """The faults stop: from now on only latency is left."""
        self.climate.loss = self.climate.echoes = self.climate.publish_loss = 0.0

    def cut(self, source: str, target: str, until: float) -> None:
        """Nothing gets from `source` to `target` (either may be EVERYBODY) before `until`."""
        self._cuts[source, target] = until
        self._worst_until = max(self._worst_until, until)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes between the two now."""
        return self._worst_until > self._time.now and self._left_s(source, target) > 0

    def lost_at(self, name: str, count: int) -> float:
        """When the first of the latest `count` lost frames between it and the router was lost."""
        lost = self._lost_at.get(name, ())
        return lost[-count] if len(lost) >= count else -MAX_ECHO_S

    def delay_s(self, source: str, target: str) -> float | None:
        """Latency, or what is left of a cut; LOST; None when the link does not survive."""
        climate, random = self.climate, self._random
        latency_s = climate.latency_s * (0.5 + random())
        if self._worst_until > self._time.now:
            left_s = self._left_s(source, target)
            if left_s > 0:
                return None if left_s > BREAK_AFTER_S else left_s + latency_s
        if climate.loss and random() < climate.loss:
            peer = source if target in ROUTERS else target
            self._lost_at.setdefault(peer, []).append(self._time.now)
            return LOST
        return latency_s

    def echo_s(self) -> float:
        """When a second copy follows; 0 for none."""
        echoes = self.climate.echoes
        if not echoes or self._random() >= echoes:
            return 0.0
        return MAX_ECHO_S * self._random()

    def publish_delay_s(self, source: str, target: str) -> float:
        """Publications are dropped at random and in every cut."""
        climate, random = self.climate, self._random
        if climate.publish_loss and random() < climate.publish_loss:
            return LOST
        if self.is_cut(source, target):
            return LOST
        return climate.latency_s * (0.5 + random())

    def _left_s(self, source: str, target: str) -> float:
        """Seconds until nothing stands between the two."""
        until = self._cuts.get
        both = until((source, target), 0.0)
        worst = max(both, until((source, EVERYBODY), 0.0), until((EVERYBODY, target), 0.0))
        return worst - self._time.now
