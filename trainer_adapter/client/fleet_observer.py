"""Observes a fleet by asking its router again and again: frames with rates, and what happened."""

from typing import NamedTuple

from rolloutbus.bus.actor.loop import BootClock, Clock
from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges, loads_of
from rolloutbus.trainer_adapter.client.fleet_events import FleetEvent, events_between
from rolloutbus.trainer_adapter.client.fleet_frames import TopFrame, TopHistory

STATUS_S = 3.0
"""How long the router may take to answer."""
GAUGES_S = 1.0
"""Time that engines have to answer; a late engine has no gauges in this frame."""
MANY = 64
"""Each worker is asked on its own: of a larger fleet not in every frame."""


class Look(NamedTuple):
    """The fleet at one moment."""

    status: FleetStatus
    frame: TopFrame
    events: list[FleetEvent]
    """What happened since the look before."""


class FleetObserver:
    """Asks the router, and the engines for their gauges as long as it may."""

    def __init__(
        self, client: RolloutClient, *, gauges_every: int = 1, clock: Clock | None = None
    ) -> None:
        """Observe.

        Args:
            client: connected.
            gauges_every: in every n-th look the engines are asked for their gauges; 0: never.
            clock: of the frames; None: that of the machine.
        """
        self._client = client
        self._gauges_every = gauges_every
        self._clock = clock or BootClock()
        self._gauges: Gauges = {}
        self._n_looks = 0
        self._before: FleetStatus | None = None
        self.history = TopHistory()

    async def look(self) -> Look:
        """Ask now.

        Raises:
            BusError: the router did not answer in time.
        """
        status = await self._client.status(deadline_s=STATUS_S)
        at_s = self._clock.now()
        n_between = self._gauges_every * (1 + len(status.workers) // MANY)
        if n_between and self._n_looks % n_between == 0:
            await self._ask_for_gauges()
        self._n_looks += 1
        before, self._before = self._before, status
        events = [] if before is None else events_between(before, status)
        return Look(status, self.history.frame(status, self._gauges, at_s), events)

    async def _ask_for_gauges(self) -> None:
        try:
            self._gauges = loads_of(await self._client.get_load(deadline_s=GAUGES_S, check=False))
        except Refused as refused:
            self._gauges = {}
            if refused.code == "forbidden":
                self._gauges_every = 0
        except BusError:
            self._gauges = {}
