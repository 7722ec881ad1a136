"""A member keeps the router it obeys while that one lives, and says so to a second one."""

import random

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import ManualClock
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import Execute, MemberEffect
from rolloutbus.bus.membership.lease import REMEMBERED_BEATS, LeaseWitness
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.membership import (
    Dismissed,
    Heartbeat,
    Lease,
    Rejected,
    Welcome,
    WorkerFacts,
)

FACTS = WorkerFacts("default", "ipc://stream", 4, 128, 64, "fake", ["generate"])


class Member:
    """A member that obeys router `a` at epoch 2, which answered the heartbeat sent at `T`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        identity = MemberIdentity("worker", "w0", "b0" * 16)
        self.core = MemberCore(identity, LeaseSettings(), random.Random(7))
        self.effects = self.core.online(FACTS, self.clock.now())
        self.say(welcome(2, "a"), self.answer(2, "a"))
        assert self.core.state == "leased"

    def say(self, *entries: Entry) -> list[MemberEffect]:
        return self.core.receive(entries, self.clock.now())

    def answer(self, router_epoch: int, instance: str) -> Entry:
        """To its last heartbeat."""
        sent = [each.entry for each in self.effects if isinstance(each, Send)]
        (heartbeat,) = [unpack(entry) for entry in sent if entry.kind == "beat"][-1:]
        assert isinstance(heartbeat, Heartbeat)
        return Entry("lease", body=pack(Lease(router_epoch, instance, heartbeat.seq)))

    def reconnects(self) -> None:
        """Its link broke; it says hello on a fresh one."""
        self.core.link_down(self.clock.now())
        self.effects = []
        while not any(isinstance(each, Connect) for each in self.effects):
            self.clock.advance(0.05)
            self.effects = self.core.tick(self.clock.now())

    def generate(self) -> Entry:
        return Entry("generate", "c/1", (3, 1), self.core.epoch, "c", 1000, body=pack(Done()))


def welcome(router_epoch: int, instance: str, up_ms: int = 0) -> Entry:
    return Entry("welcome", body=pack(Welcome(router_epoch, instance, 1, [], up_ms=up_ms)))


def rejections(effects: list[MemberEffect]) -> list[Rejected]:
    sent = [unpack(each.entry) for each in effects if isinstance(each, Send)]
    return [body for body in sent if isinstance(body, Rejected)]


def test_router_that_began_after_the_last_answer_takes_the_member_over() -> None:
    member = Member()
    member.reconnects()
    assert rejections(member.say(welcome(3, "b", up_ms=10))) == []
    member.say(member.answer(3, "b"))
    assert member.core.state == "leased"


def test_router_that_ran_beside_the_one_obeyed_is_rejected() -> None:
    member = Member()
    member.reconnects()
    assert rejections(member.say(welcome(3, "b", up_ms=60_000))) == [Rejected(2, "a")]
    assert member.core.state == "relinking"


def test_router_of_an_equal_epoch_is_rejected_however_young() -> None:
    member = Member()
    member.reconnects()
    assert rejections(member.say(welcome(2, "b"))) == [Rejected(2, "a")]


def test_nothing_that_a_rejected_router_says_counts() -> None:
    member = Member()
    member.reconnects()
    lease = member.answer(3, "b")
    generate = member.generate()
    effects = member.say(welcome(3, "b", up_ms=60_000), lease, generate)
    effects += member.say(lease, generate)
    assert not any(isinstance(each, Execute) for each in effects)
    assert member.core.state == "relinking"


def test_member_goes_on_under_its_lease_when_it_is_back_at_its_router() -> None:
    member = Member()
    epoch = member.core.epoch
    member.reconnects()
    member.say(welcome(3, "b", up_ms=60_000))
    member.reconnects()
    member.say(welcome(2, "a", up_ms=90_000), member.answer(2, "a"))
    assert (member.core.state, member.core.epoch) == ("leased", epoch)
    assert any(isinstance(each, Execute) for each in member.say(member.generate()))


def test_answer_read_late_proves_no_more_than_when_its_heartbeat_was_sent() -> None:
    witness = LeaseWitness()
    seq = witness.heartbeat(10.0)
    witness.answered(seq)
    assert witness.has_outlived(up_s=41.0, now=50.0)
    assert not witness.has_outlived(up_s=39.0, now=50.0)


def test_answers_to_forgotten_or_unknown_heartbeats_prove_nothing() -> None:
    witness = LeaseWitness()
    first = witness.heartbeat(10.0)
    for n in range(REMEMBERED_BEATS):
        witness.heartbeat(11.0 + n)
    witness.answered(first)
    witness.answered(999)
    assert not witness.has_outlived(up_s=1e9, now=50.0)


STANDBY = Entry("dismissed", body=pack(Dismissed("standby", "it stands by")))


def test_member_goes_on_from_a_standby_to_the_next_router_and_keeps_its_lease() -> None:
    member = Member()
    epoch = member.core.epoch
    member.reconnects()
    assert Connect(1) in member.effects
    member.say(STANDBY)
    assert member.core.is_at_standby
    assert member.core.state == "relinking"
    while Connect(2) not in member.effects:
        member.clock.advance(0.05)
        member.effects = member.core.tick(member.clock.now())
    assert not member.core.is_at_standby
    member.say(welcome(2, "a", up_ms=90_000), member.answer(2, "a"))
    assert (member.core.state, member.core.epoch) == ("leased", epoch)


def test_a_router_that_stands_down_lets_its_member_go_to_one_that_ran_beside_it() -> None:
    member = Member()
    member.say(STANDBY)
    member.reconnects()
    assert rejections(member.say(welcome(3, "b", up_ms=60_000))) == []
    member.say(member.answer(3, "b"))
    assert member.core.state == "leased"


def test_a_standby_says_nothing_about_the_router_that_is_obeyed() -> None:
    member = Member()
    member.reconnects()
    member.say(STANDBY)
    member.reconnects()
    assert rejections(member.say(welcome(3, "b", up_ms=60_000))) == [Rejected(2, "a")]
