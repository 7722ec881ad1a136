"""Connections are turned away while descriptors are scarce, so that they never run out.

Without any left, libzmq can neither take a connection nor refuse it: it tries again at once, for
ever, on a whole core. And to stop listening would end the links that exist. So whoever comes in too
late is taken and cut off, which the system tells the peer at once.
"""

from collections.abc import Sequence

import zmq

from rolloutbus.bus.actor.resources import is_scarce
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_monitor import LinkEvent, Monitor
from rolloutbus.bus.transport.zmq_wires import hang_up_fd


class Admission:
    """Watches over one listening socket, from when it is bound."""

    def __init__(self, listener: zmq.Socket[bytes], counters: PortCounters) -> None:
        self._counters = counters
        self._monitor = Monitor(listener, zmq.EVENT_ACCEPTED, self._accepted)

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._monitor.close()

    def _accepted(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            if is_scarce(event.value):
                self._counters.turned_away += 1
                # If libzmq has closed it already, the number may be somebody else's by now: a later
                # connection's, which must go as well, or one of our own, which comes back.
                hang_up_fd(event.value)
