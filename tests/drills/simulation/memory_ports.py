"""Ports in one process: the same bytes as on a socket, under virtual time and weather.

Delivery is in order per direction of a link, and a link that breaks loses what is under way, as
TCP does; the weather may do worse. Owners call `flush` at the end of what they do at one moment,
as a loop tick does for real ports. Nothing is counted: whoever looks has the trace.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rolloutbus.bus.transport.ports import (
    BatchHandler,
    DownHandler,
    PeerBatchHandler,
    TopicBatchHandler,
)
from rolloutbus.bus.wire.codec import decode_batch, encode_batch
from rolloutbus.bus.wire.entry import Entry, Peer
from tests.drills.simulation.virtual_time import VirtualTime

BREAK_AFTER_S = 10.0
"""A link that carries nothing is found out after this long, as by the system's keep-alive."""
LOST = -1.0
"""Instead of a delay: the message is dropped and its link stays, as at a full queue."""

Tap = Callable[[str, str, list[Entry]], None]
"""(source, target, entries) of every delivered batch."""


class Weather(Protocol):
    """What the network does to a message now."""

    def delay_s(self, source: str, target: str) -> float | None:
        """Seconds until it arrives; LOST; None: it never does, and its link dies."""
        ...

    def echo_s(self) -> float:
        """Seconds after which a second copy arrives; 0: there is none."""
        ...

    def publish_delay_s(self, source: str, target: str) -> float:
        """Seconds until a published message arrives at one subscriber, or LOST."""
        ...


class FairWeather:
    """Everything arrives once, at once."""

    def delay_s(self, source: str, target: str) -> float | None:
        """No delay."""
        del source, target
        return 0.0

    def echo_s(self) -> float:
        """No second copies."""
        return 0.0

    def publish_delay_s(self, source: str, target: str) -> float:
        """No delay."""
        del source, target
        return 0.0


class MemoryNet:
    """All ports of one pretended network."""

    def __init__(
        self, time: VirtualTime, weather: Weather | None = None, tap: Tap | None = None
    ) -> None:
        self.time = time
        self.weather = weather or FairWeather()
        self.tap = tap
        self._hubs: defaultdict[str, list[MemoryHub]] = defaultdict(list)
        self._links: dict[str, MemoryLink] = {}
        self._subscribers: defaultdict[str, list[MemorySubscriber]] = defaultdict(list)
        self._n_links = 0

    def hub(self, endpoint: str, owner: str, on_batch: PeerBatchHandler) -> "MemoryHub":
        """Listen; new links come here until it closes, older ones stay with who listened before."""
        hub = MemoryHub(self, owner, on_batch)
        self._hubs[endpoint] = [each for each in self._hubs[endpoint] if not each.is_closed]
        self._hubs[endpoint].append(hub)
        return hub

    def link(
        self, endpoint: str, owner: str, on_batch: BatchHandler, on_down: DownHandler
    ) -> "MemoryLink":
        """Connect with a fresh routing id; goes down at once if nobody listens."""
        self._n_links += 1
        peer = Peer(b"\x01" + self._n_links.to_bytes(15, "big"))
        link = MemoryLink(self, owner, peer, on_batch, on_down)
        self._links[owner] = link
        hub = next((each for each in reversed(self._hubs[endpoint]) if not each.is_closed), None)
        if hub is None:
            self.time.later(0.0, link.break_)
        else:
            link.attach(hub)
        return link

    def mute(self, owner: str) -> None:
        """The owner's present link goes half-open: nothing passes, and nobody is told."""
        link = self._links.get(owner)
        if link is not None:
            link.mute()

    def haunt(self, hub: "MemoryHub", target: str, frame: bytes) -> None:
        """A frame of a link that is gone reaches the next link between the same two."""
        link = self._links.get(target)
        if link is not None and link.is_open and link.leads_to(hub):
            link.arrived(self.arrived(hub.owner, target, frame))

    def publisher(self, endpoint: str, owner: str) -> "MemoryPublisher":
        """Publish at an endpoint."""
        return MemoryPublisher(self, owner, endpoint)

    def subscriber(
        self, owner: str, on_batch: TopicBatchHandler, topics: Sequence[bytes]
    ) -> "MemorySubscriber":
        """Subscribe to topics, of publishers yet to be connected to."""
        return MemorySubscriber(self, owner, on_batch, topics)

    def listen(self, endpoint: str, subscriber: "MemorySubscriber") -> None:
        """A subscriber connects to a publisher, now or whenever it appears."""
        self._subscribers[endpoint].append(subscriber)

    def unlisten(self, endpoint: str, subscriber: "MemorySubscriber") -> None:
        """A subscriber leaves a publisher."""
        self._subscribers[endpoint] = [
            s for s in self._subscribers[endpoint] if s is not subscriber
        ]

    def broadcast(self, endpoint: str, owner: str, topic: bytes, entry: Entry) -> None:
        """Bring a published entry to every subscriber of its topic."""
        frame = b""
        for subscriber in self._subscribers[endpoint]:
            if not subscriber.wants(topic):
                continue
            delay_s = self.weather.publish_delay_s(owner, subscriber.owner)
            if delay_s != LOST:
                frame = frame or encode_batch([entry])
                delay_s = subscriber.in_order(endpoint, self.time.now, delay_s)
                self.time.later(delay_s, partial(subscriber.arrived, owner, topic, frame))

    def arrived(self, source: str, target: str, frame: bytes) -> list[Entry]:
        """The entries of a frame that has come through."""
        self.time.record(frame)
        entries = decode_batch(frame, is_trusted=True)
        if self.tap is not None:
            self.tap(source, target, entries)
        return entries


class _Way:
    """One direction of a link: frames under way arrive in the order they were sent."""

    def __init__(self, net: MemoryNet, source: str, target: str, deliver: BatchHandler) -> None:
        self.is_open = True
        self.is_mute = False
        self.break_: Callable[[], None] = lambda: None
        self.hub: MemoryHub | None = None
        """Where it comes from; None on the way there."""
        self._net = net
        self._source, self._target = source, target
        self._deliver = deliver
        self._under_way: deque[bytes] = deque()
        self._later, self._arrived = net.time.later, net.arrived
        self._delay_s, self._echo_s = net.weather.delay_s, net.weather.echo_s

    def carry(self, entries: list[Entry]) -> None:
        """Send one batch."""
        if not self.is_open or self.is_mute:
            return
        delay_s = self._delay_s(self._source, self._target)
        if delay_s is None:
            self.is_mute = True  # until the system notices
            self._later(BREAK_AFTER_S, self.break_)
        elif delay_s != LOST:
            frame = encode_batch(entries)
            self._under_way.append(frame)
            self._later(delay_s, self._arrive)
            echo_s = self._echo_s()
            if echo_s:
                self._later(delay_s + echo_s, partial(self._echo, frame))

    def _arrive(self) -> None:
        """One more delay is over: the oldest frame is there."""
        frame = self._under_way.popleft()
        if self.is_open and not self.is_mute:
            self._deliver(self._arrived(self._source, self._target, frame))

    def _echo(self, frame: bytes) -> None:
        """A second copy; on the target's next link if this one is gone: worse than TCP does."""
        if not self.is_open:
            if self.hub is not None:
                self._net.haunt(self.hub, self._target, frame)
        elif not self.is_mute:
            self._deliver(self._arrived(self._source, self._target, frame))


class MemoryLink:
    """One end of a link."""

    def __init__(
        self,
        net: MemoryNet,
        owner: str,
        peer: Peer,
        on_batch: BatchHandler,
        on_down: DownHandler,
    ) -> None:
        self.owner = owner
        self.peer = peer
        self._net = net
        self._on_batch = on_batch
        self._on_down = on_down
        self._entries: list[Entry] = []
        self._hub: MemoryHub | None = None
        self._out: _Way | None = None
        self._back: _Way | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether its owner still uses it."""
        return not self._is_closed

    def leads_to(self, hub: "MemoryHub") -> bool:
        """Whether its other end is there."""
        return self._hub is hub

    def attach(self, hub: "MemoryHub") -> None:
        """The connection stands."""
        self._hub = hub

        def deliver(entries: list[Entry]) -> None:
            hub.arrived(self.peer, entries)

        self._out = _Way(self._net, self.owner, hub.owner, deliver)
        self._back = _Way(self._net, hub.owner, self.owner, self.arrived)
        self._back.hub = hub
        self._out.break_ = self._back.break_ = self.break_
        hub.joined(self.peer, self, self._back)

    def send(self, entry: Entry) -> None:
        """Queue for the end of this moment; lost if there is no connection by then."""
        self._entries.append(entry)

    def flush(self) -> None:
        """The end of this moment."""
        if self._entries:
            entries, self._entries = self._entries, []
            if self._out is not None and not self._is_closed:
                self._out.carry(entries)

    def close(self, *, linger_ms: int = 0) -> None:
        """Drop the link on this side; what left it already may still arrive, even late."""
        del linger_ms  # what is queued is lost, as on a socket that does not linger
        self._is_closed = True
        if self._back is not None:
            self._back.is_open = False
        if self._hub is not None:
            self._hub.left(self.peer)

    def break_(self) -> None:
        """The network lost the connection, and what was under way on it."""
        if self._out is not None:
            self._out.is_open = False
        if not self._is_closed:
            self.close()
            self._on_down()

    def mute(self) -> None:
        """Half-open: see `MemoryNet.mute`."""
        for way in (self._out, self._back):
            if way is not None:
                way.is_mute = True

    def arrived(self, entries: list[Entry]) -> None:
        """A batch from the hub."""
        if not self._is_closed:
            self._on_batch(entries)


class MemoryHub:
    """The middle of a star."""

    def __init__(self, net: MemoryNet, owner: str, on_batch: PeerBatchHandler) -> None:
        self.owner = owner
        self.is_closed = False
        self._net = net
        self._on_batch = on_batch
        self._links: dict[Peer, MemoryLink] = {}
        self._ways: dict[Peer, _Way] = {}

    def joined(self, peer: Peer, link: MemoryLink, back: _Way) -> None:
        """A link was made."""
        self._links[peer] = link
        self._ways[peer] = back

    def left(self, peer: Peer) -> None:
        """A link is gone."""
        self._links.pop(peer, None)
        self._ways.pop(peer, None)

    def send_all(self, peer: Peer, entries: list[Entry]) -> bool:
        """Send one batch; False, and dropped, if the peer is not here."""
        way = self._ways.get(peer)
        if way is None:
            return False
        way.carry(entries)
        return True

    def close(self, *, is_silent: bool = False) -> None:
        """The process is gone: every link breaks, or goes mute if its machine went with it."""
        self.is_closed = True
        for link in list(self._links.values()):
            if is_silent:
                link.mute()
            else:
                link.break_()

    def arrived(self, peer: Peer, entries: list[Entry]) -> None:
        """A batch from one link."""
        if not self.is_closed:
            self._on_batch(peer, entries)


class MemoryPublisher:
    """A publisher."""

    def __init__(self, net: MemoryNet, owner: str, endpoint: str) -> None:
        self.endpoint = endpoint
        self._net, self._owner = net, owner
        self._is_closed = False

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Send to everyone who wants this topic now."""
        if not self._is_closed:
            self._net.broadcast(self.endpoint, self._owner, topic, entry)

    def close(self) -> None:
        """Stop publishing."""
        self._is_closed = True


class MemorySubscriber:
    """A subscriber."""

    def __init__(
        self, net: MemoryNet, owner: str, on_batch: TopicBatchHandler, topics: Sequence[bytes]
    ) -> None:
        self.owner = owner
        self._net = net
        self._on_batch = on_batch
        self._topics = tuple(topics)
        self._is_closed = False
        self._latest: dict[str, float] = {}

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        self._net.listen(endpoint, self)

    def disconnect(self, endpoint: str) -> None:
        """Stop listening to a publisher."""
        self._net.unlisten(endpoint, self)

    def close(self) -> None:
        """Hear no more."""
        self._is_closed = True

    def wants(self, topic: bytes) -> bool:
        """Whether any of the subscriptions is a prefix of this topic."""
        return not self._is_closed and topic.startswith(self._topics)

    def in_order(self, endpoint: str, now: float, delay_s: float) -> float:
        """The delay of a frame that must not overtake those before it."""
        arrival = max(now + delay_s, self._latest.get(endpoint, 0.0))
        self._latest[endpoint] = arrival
        return arrival - now

    def arrived(self, source: str, topic: bytes, frame: bytes) -> None:
        """A published frame."""
        if not self._is_closed:
            self._on_batch(topic, self._net.arrived(source, self.owner, frame))
