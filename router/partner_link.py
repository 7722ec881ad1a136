"""The link of a router to the other router of its fleet: a socket around `Pair`."""

from collections.abc import Callable, Sequence

from rolloutbus.bus.actor.effects import Connect
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.router.pair import Effect


class PartnerLink:
    """Carries out what `Pair` wants, and hands on what it must hear."""

    def __init__(
        self,
        other: str,
        dialer: Dialer | None,
        on_batch: Callable[[list[Entry]], None],
        on_down: Callable[[], None],
    ) -> None:
        self._other = other
        self._dialer = dialer
        self._on_batch = on_batch
        self._on_down = on_down
        self._port: DealerPort | None = None

    def apply(self, effects: Sequence[Effect]) -> None:
        """Connect anew, and send."""
        for effect in effects:
            if isinstance(effect, Connect):
                self.close()
                self._port = DealerPort(
                    self._other, self._on_batch, self._on_down, dialer=self._dialer
                )
            elif self._port is not None:
                self._port.send(effect.entry)

    def close(self) -> None:
        """Drop the connection, if there is one."""
        if self._port is not None:
            self._port.close()
            self._port = None
