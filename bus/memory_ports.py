"""Ports in one process: the same bytes as on a socket, carried by whatever schedules them.

Tests and the simulator put their own time and weather underneath; delivery is in order per
direction of a link, and a link that breaks loses what is under way, as TCP does.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from bus.codec import decode_batch, encode_batch
from bus.entry import Entry
from bus.ids import Peer
from bus.ports import BatchHandler, DownHandler, PeerBatchHandler, PortCounters, TopicBatchHandler

Later = Callable[[float, Callable[[], None]], None]
"""(delay in seconds, what to do then)."""


class Weather(Protocol):
    """What the network does to a message now."""

    def delay_s(self, source: str, target: str) -> float | None:
        """Seconds until it arrives; None: it never does, and its link breaks."""
        ...

    def loses_published(self, source: str, target: str) -> bool:
        """Whether a published message is dropped on its way to one subscriber."""
        ...


class FairWeather:
    """Everything arrives at once."""

    def delay_s(self, source: str, target: str) -> float | None:
        """No delay."""
        del source, target
        return 0.0

    def loses_published(self, source: str, target: str) -> bool:
        """Nothing is lost."""
        del source, target
        return False


class MemoryNet:
    """All ports of one pretended network."""

    def __init__(self, later: Later, weather: Weather | None = None) -> None:
        self._later = later
        self._weather = weather or FairWeather()
        self._hubs: dict[str, MemoryHub] = {}
        self._publishers: dict[str, MemoryPublisher] = {}
        self._subscribers: defaultdict[str, list[MemorySubscriber]] = defaultdict(list)
        self._n_links = 0

    def hub(self, endpoint: str, owner: str, on_batch: PeerBatchHandler) -> "MemoryHub":
        """Listen; takes over from whoever listened there before."""
        hub = MemoryHub(self, owner, on_batch)
        self._hubs[endpoint] = hub
        return hub

    def link(
        self, endpoint: str, owner: str, on_batch: BatchHandler, on_down: DownHandler
    ) -> "MemoryLink":
        """Connect with a fresh routing id; goes down at once if nobody listens."""
        self._n_links += 1
        peer = Peer(b"\x01" + self._n_links.to_bytes(15, "big"))
        link = MemoryLink(self, owner, peer, on_batch, on_down)
        hub = self._hubs.get(endpoint)
        if hub is None or hub.is_closed:
            self._later(0.0, link.break_)
        else:
            link.attach(hub)
        return link

    def publisher(self, endpoint: str, owner: str) -> "MemoryPublisher":
        """Publish at an endpoint."""
        publisher = MemoryPublisher(self, owner, endpoint)
        self._publishers[endpoint] = publisher
        return publisher

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

    def carry(self, frame: bytes, way: "_Way") -> None:
        """Bring one frame along one direction of a link, after those before it."""
        delay_s = self._weather.delay_s(way.source, way.target)
        if delay_s is None:
            way.break_()
            return
        way.under_way.append(frame)
        self._later(delay_s, way.arrive)

    def broadcast(self, endpoint: str, owner: str, topic: bytes, frame: bytes) -> None:
        """Bring a published frame to every subscriber of its topic."""
        for subscriber in self._subscribers[endpoint]:
            if not subscriber.wants(topic) or self._weather.loses_published(
                owner, subscriber.owner
            ):
                continue
            delay_s = self._weather.delay_s(owner, subscriber.owner)
            if delay_s is not None:
                self._later(delay_s, _Arrival(subscriber, topic, frame))

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Run at the end of the present moment, as a loop tick's flush."""
        self._later(0.0, flush)


class _Arrival:
    def __init__(self, subscriber: "MemorySubscriber", topic: bytes, frame: bytes) -> None:
        self._subscriber, self._topic, self._frame = subscriber, topic, frame

    def __call__(self) -> None:
        self._subscriber.arrived(self._topic, self._frame)


class _Way:
    """One direction of a link: frames under way arrive in the order they were sent."""

    def __init__(
        self, source: str, target: str, deliver: BatchHandler, break_: Callable[[], None]
    ) -> None:
        self.source, self.target = source, target
        self.under_way: list[bytes] = []
        self.is_open = True
        self.break_ = break_
        self._deliver = deliver

    def arrive(self) -> None:
        """One more delay is over: the oldest frame is there."""
        if self.is_open and self.under_way:
            self._deliver(decode_batch(self.under_way.pop(0)))


class _Queue:
    """Entries of one moment, sent as one frame at its end."""

    def __init__(self, net: MemoryNet, counters: PortCounters, way: _Way) -> None:
        self._net, self._counters, self._way = net, counters, way
        self._entries: list[Entry] = []

    def put(self, entry: Entry) -> None:
        if not self._entries:
            self._net.flush_soon(self._flush)
        self._entries.append(entry)

    def _flush(self) -> None:
        entries, self._entries = self._entries, []
        if entries and self._way.is_open:
            self._counters.frames_out += 1
            self._counters.entries_out += len(entries)
            self._net.carry(encode_batch(entries), self._way)


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
        self.counters = PortCounters()
        self.owner = owner
        self.peer = peer
        self.on_batch = on_batch
        self._net = net
        self._on_down = on_down
        self._ways: list[_Way] = []
        self._queue: _Queue | None = None
        self._hub: MemoryHub | None = None
        self._is_closed = False

    def attach(self, hub: "MemoryHub") -> None:
        """The connection stands."""
        self._hub = hub
        out = _Way(self.owner, hub.owner, lambda es: hub.arrived(self.peer, es), self.break_)
        back = _Way(hub.owner, self.owner, self._arrived, self.break_)
        self._ways = [out, back]
        self._queue = _Queue(self._net, self.counters, out)
        hub.joined(self.peer, self, back)

    def send(self, entry: Entry) -> None:
        """Queue for the end of this moment."""
        if self._queue is None or self._is_closed:
            self.counters.dropped_out += 1
        else:
            self._queue.put(entry)

    def close(self, *, linger_ms: int = 0) -> None:
        """Drop the link silently on this side; the hub notices only by silence."""
        del linger_ms  # what is queued is lost, as on a socket that does not linger
        self._is_closed = True
        for way in self._ways:
            way.is_open = False
        if self._hub is not None:
            self._hub.left(self.peer)

    def break_(self) -> None:
        """The network lost the connection."""
        if not self._is_closed:
            self.close()
            self._on_down()

    def _arrived(self, entries: list[Entry]) -> None:
        self.counters.entries_in += len(entries)
        self.on_batch(entries)


class MemoryHub:
    """The middle of a star."""

    def __init__(self, net: MemoryNet, owner: str, on_batch: PeerBatchHandler) -> None:
        self.counters = PortCounters()
        self.owner = owner
        self.is_closed = False
        self._net = net
        self._on_batch = on_batch
        self._links: dict[Peer, MemoryLink] = {}
        self._queues: dict[Peer, _Queue] = {}

    def joined(self, peer: Peer, link: MemoryLink, back: _Way) -> None:
        """A link was made."""
        self._links[peer] = link
        self._queues[peer] = _Queue(self._net, self.counters, back)

    def left(self, peer: Peer) -> None:
        """A link is gone."""
        self._links.pop(peer, None)
        self._queues.pop(peer, None)

    def send(self, peer: Peer, entry: Entry) -> None:
        """Queue for the end of this moment; dropped and counted if the peer is gone."""
        queue = self._queues.get(peer)
        if queue is None:
            self.counters.dropped_out += 1
        else:
            queue.put(entry)

    def close(self) -> None:
        """The process is gone: every link breaks."""
        self.is_closed = True
        for link in list(self._links.values()):
            link.break_()

    def arrived(self, peer: Peer, entries: list[Entry]) -> None:
        """A batch from one link."""
        if not self.is_closed:
            self.counters.entries_in += len(entries)
            self._on_batch(peer, entries)


class MemoryPublisher:
    """A publisher."""

    def __init__(self, net: MemoryNet, owner: str, endpoint: str) -> None:
        self.counters = PortCounters()
        self.endpoint = endpoint
        self._net, self._owner = net, owner
        self._is_closed = False

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Send to everyone who wants this topic now."""
        if not self._is_closed:
            self.counters.entries_out += 1
            self._net.broadcast(self.endpoint, self._owner, topic, encode_batch([entry]))

    def close(self) -> None:
        """Stop publishing."""
        self._is_closed = True


class MemorySubscriber:
    """A subscriber."""

    def __init__(
        self, net: MemoryNet, owner: str, on_batch: TopicBatchHandler, topics: Sequence[bytes]
    ) -> None:
        self.counters = PortCounters()
        self.owner = owner
        self._net = net
        self._on_batch = on_batch
        self._topics = tuple(topics)
        self._is_closed = False

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
        return any(topic.startswith(wanted) for wanted in self._topics)

    def arrived(self, topic: bytes, frame: bytes) -> None:
        """A published frame."""
        if not self._is_closed:
            self._on_batch(topic, decode_batch(frame))
