"""A tap tells all that the router hears and says, in order, and changes none of it."""

from random import Random

from rolloutbus.bus.actor.effects import SendAll
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.streams.tap import TapMark, mark_in
from rolloutbus.bus.wire.codec import encode_batch, pack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat, Hello
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Malformed, Received, Returned, Revoked, Ticked
from rolloutbus.router.settings import RouterSettings
from rolloutbus.router.tap import TapFeed, tapped

SETTINGS = RouterSettings("ipc:///r/front", "ipc:///r/back")
PEER = Peer(b"a" * 16)
OTHER = Peer(b"b" * 16)
HELLO = [Entry("hello", body=pack(Hello("client", "trainer", "f" * 32)))]
BEAT = [Entry("client_beat", body=pack(ClientHeartbeat(1)))]


def core() -> RouterCore:
    made = RouterCore(SETTINGS, "router-a", Random(1))
    made.handle(Ticked(), 0.0)
    return made


class Tapped:
    """A tapped core and what it published."""

    def __init__(self) -> None:
        self.published: list[tuple[TapMark, list[Entry]]] = []
        self.counted: list[tuple[str, int]] = []
        self.has_room = True
        plain = core()
        self.handle = tapped(plain.handle, TapFeed(plain.context, self._publish, self._count))

    def _publish(self, topic: bytes, entries: list[Entry]) -> bool:
        if self.has_room:
            self.published.append((mark_in(topic), entries))
        return self.has_room

    def _count(self, name: str, by: int) -> None:
        self.counted.append((name, by))

    def told(self) -> list[tuple[str, int, str, list[str]]]:
        """(event, connection, name, kinds) of each message so far."""
        return [
            (mark.event, mark.connection, mark.name, [entry.kind for entry in entries])
            for mark, entries in self.published
        ]


def test_what_comes_in_is_told_before_what_it_led_to() -> None:
    tapped = Tapped()
    tapped.handle(Received(PEER, [*HELLO, *BEAT]), 1.0)
    tapped.handle(Ticked(), 1.5)
    assert tapped.told() == [
        ("received", 1, "trainer", ["hello", "client_beat"]),
        ("sent", 1, "trainer", ["welcome", "lease"]),
        ("tick", 0, "", []),
    ]
    assert [mark.n for mark, _ in tapped.published] == [0, 1, 2]
    assert [mark.at for mark, _ in tapped.published] == [1.0, 1.0, 1.5]


def test_the_core_does_and_says_the_same_under_a_tap() -> None:
    plain, tapped = core(), Tapped()
    command = [Entry("abort", "trainer/1", deadline_ms=1000, body=pack(Abort()))]
    for at, entries in enumerate((HELLO, BEAT, command, [Entry("nonsense")]), start=1):
        said = plain.handle(Received(PEER, entries), float(at))
        assert tapped.handle(Received(PEER, entries), float(at)) == said
        sent = [each.entries for each in said if isinstance(each, SendAll)]
        published = [each for mark, each in tapped.published if mark.event == "sent"]
        assert published[len(published) - len(sent) :] == sent
    assert plain.handle(Ticked(), 9.0) == tapped.handle(Ticked(), 9.0)
    assert plain.handle(Malformed(PEER), 9.5) == tapped.handle(Malformed(PEER), 9.5)
    assert plain.handle(Revoked([PEER], "forbidden"), 10.0) == tapped.handle(
        Revoked([PEER], "forbidden"), 10.0
    )


def test_entries_are_published_as_they_are_and_in_a_list_of_their_own() -> None:
    tapped = Tapped()
    effects = tapped.handle(Received(PEER, HELLO), 1.0)
    (sent,) = [each for each in effects if isinstance(each, SendAll)]
    (_, heard), (_, said) = tapped.published
    assert encode_batch(heard) == encode_batch(HELLO)
    assert said == sent.entries
    sent.entries.append(BEAT[0])  # the port goes on with the list
    assert len(said) == 1


def test_connections_have_numbers_that_are_not_used_again() -> None:
    tapped = Tapped()
    tapped.handle(Received(PEER, BEAT), 1.0)  # a stranger: dismissed, and forgotten
    tapped.handle(Received(PEER, HELLO), 2.0)
    tapped.handle(Received(OTHER, BEAT), 3.0)
    numbers = [mark.connection for mark, _ in tapped.published if mark.event == "received"]
    assert numbers == [1, 2, 3]


def test_what_a_key_says_and_loses_is_told_too() -> None:
    tapped = Tapped()
    principal = Principal("0" * 64, "trainer", "trainer")
    tapped.handle(Received(PEER, HELLO, principal), 1.0)
    tapped.handle(Malformed(PEER), 2.0)
    tapped.handle(Revoked([PEER], "forbidden"), 3.0)
    events = [mark.event for mark, _ in tapped.published]
    assert events == ["received", "sent", "malformed", "revoked", "sent"]
    assert tapped.told()[-1] == ("sent", 1, "trainer", ["dismissed"])


def test_what_could_not_be_delivered_is_told_with_what_it_led_to() -> None:
    tapped = Tapped()
    tapped.handle(Received(PEER, HELLO), 1.0)
    tapped.handle(Returned(PEER, [Entry("generate", "trainer/1")]), 2.0)
    assert tapped.told()[-1] == ("undelivered", 1, "trainer", ["generate"])


def test_what_the_port_has_no_room_for_is_counted_and_shows_in_the_numbers() -> None:
    tapped = Tapped()
    tapped.handle(Ticked(), 1.0)
    tapped.has_room = False
    tapped.handle(Received(PEER, HELLO), 2.0)
    tapped.has_room = True
    tapped.handle(Ticked(), 3.0)
    assert [mark.n for mark, _ in tapped.published] == [0, 3]
    assert tapped.counted == [("tap_dropped", 1), ("tap_dropped", 1)]
