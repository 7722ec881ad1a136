"""Code that all listening clients share: reading along with a client, following the tap.

Spec: docs/protocol.md, "Membership", "The tap".
"""

from collections.abc import Callable

from rolloutbus.bus.transport.ports import (
    BatchHandler,
    DownHandler,
    LinkPort,
    SubscriptionPort,
    TopicBatchHandler,
)
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost, RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Dismissed
from rolloutbus.trainer_adapter.client.connection import Ports

OpenLink = Callable[[str, BatchHandler, DownHandler], LinkPort]


def sent_away(entry: Entry) -> PeerLost | None:
    """The error if the router dismisses its client for good; None: it may greet again."""
    if entry.kind != "dismissed":
        return None
    try:
        dismissed = unpack_as(Dismissed, entry)
    except RemoteProtocolError:
        return None
    if not dismissed.is_final:
        return None
    return PeerLost(f"the router will not have it: {dismissed.message}")


def read_along(open_link: OpenLink, heard: Callable[[list[Entry]], None]) -> OpenLink:
    """The link of a client; `heard` gets every batch from the router after the client."""

    def opened(endpoint: str, on_batch: BatchHandler, on_down: DownHandler) -> LinkPort:
        def both(entries: list[Entry]) -> None:
            on_batch(entries)
            heard(entries)

        return open_link(endpoint, both, on_down)

    return opened


class TapFollower:
    """A subscription to the tap of the present router."""

    def __init__(self, ports: Ports, on_tap: TopicBatchHandler) -> None:
        self._ports = ports
        self._on_tap = on_tap
        self._port: SubscriptionPort | None = None
        self.endpoint = ""
        """Empty: the router has none."""

    def follow(self, endpoint: str) -> None:
        """Listen there from now on."""
        if endpoint == self.endpoint:
            return
        self.close()
        self.endpoint = endpoint
        if endpoint:
            self._port = self._ports.subscription(self._on_tap, [])
            self._port.connect(endpoint)

    def close(self) -> None:
        """Listen no more."""
        if self._port is not None:
            self._port.close()
            self._port = None
