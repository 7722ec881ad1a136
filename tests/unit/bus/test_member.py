"""The member core: leases from the sending of heartbeats, epochs, one execution per attempt."""

import random
from collections.abc import Sequence

import pytest

from rolloutbus.bus.actor.effects import Connect, Send, Stop
from rolloutbus.bus.actor.loop import ManualClock
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity, Vitals
from rolloutbus.bus.membership.deliveries import (
    Execute,
    LetIn,
    MemberEffect,
    StopSilently,
    StopWork,
)
from rolloutbus.bus.security.principals import Principal, handed
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Done, Fenced
from rolloutbus.bus.wire.messages.membership import (
    Dismissed,
    HandedKeys,
    Heartbeat,
    Hello,
    Lease,
    Welcome,
    WorkerFacts,
)

FACTS = WorkerFacts("default", "ipc://stream", 4, 128, 64, "fake", ["generate"])
DONE = pack(Done())
FIRST: AttemptKey = (RequestId("c/1"), (1, 1))


class Bench:
    """One member and everything it has asked for; the router is whoever calls `say`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = MemberCore(
            MemberIdentity("worker", "w0", "b0" * 16),
            LeaseSettings(),
            random.Random(7),
            lambda: Vitals(version=3, free=4),
        )
        self.effects: list[MemberEffect] = []

    @property
    def now(self) -> float:
        return self.clock.now()

    def collect(self, effects: Sequence[MemberEffect]) -> list[MemberEffect]:
        self.effects += effects
        return list(effects)

    def say(self, *entries: Entry) -> list[MemberEffect]:
        return self.collect(self.core.receive(entries, self.now))

    def sent(self, kind: str) -> list[Entry]:
        return [e.entry for e in self.effects if isinstance(e, Send) and e.entry.kind == kind]

    def last_heartbeat(self) -> Heartbeat:
        heartbeat = unpack(self.sent("beat")[-1])
        assert isinstance(heartbeat, Heartbeat)
        return heartbeat

    def answer_heartbeat(self, router_epoch: int = 1, instance: str = "r1") -> None:
        self.say(lease(self.last_heartbeat().seq, router_epoch, instance))

    def pass_time(self, seconds: float, *, answered: bool) -> None:
        """Tick every 50 ms."""
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            n_heartbeats = len(self.sent("beat"))
            self.collect(self.core.tick(self.now))
            if answered and len(self.sent("beat")) > n_heartbeats:
                self.answer_heartbeat()

    def generate(self, rid: str, n: int = 1, *, epoch: str | None = None) -> Entry:
        return Entry("generate", rid, (1, n), epoch or self.core.epoch, "client", 1000, body=DONE)


def lease(seq: int, router_epoch: int = 1, instance: str = "r1") -> Entry:
    return Entry("lease", body=pack(Lease(router_epoch, instance, seq)))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.collect(bench.core.online(FACTS, bench.now))
    return bench


@pytest.fixture
def leased(bench: Bench) -> Bench:
    bench.answer_heartbeat()
    assert bench.core.state == "leased"
    return bench


def of(kind: type, effects: list[MemberEffect]) -> list[MemberEffect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_joining_connects_and_says_hello_and_a_heartbeat(bench: Bench) -> None:
    assert isinstance(bench.effects[0], Connect)
    hello = unpack(bench.sent("hello")[0])
    assert isinstance(hello, Hello)
    assert hello.worker == FACTS
    assert hello.epoch == bench.core.epoch == "b0" * 16 + ".1"
    assert bench.last_heartbeat().version == 3


def test_no_command_is_executed_before_the_lease(bench: Bench) -> None:
    assert of(Execute, bench.say(bench.generate("c/1"))) == []
    assert bench.core.counters.fenced == 1


def test_lease_runs_from_the_moment_the_heartbeat_was_sent(bench: Bench) -> None:
    bench.clock.advance(2.3)
    bench.answer_heartbeat()
    assert bench.core.state == "leased"
    bench.clock.advance(0.11)
    assert of(StopWork, bench.collect(bench.core.tick(bench.now)))


def test_answer_that_comes_after_its_lease_would_have_ended_gives_none(bench: Bench) -> None:
    bench.clock.advance(2.5)
    bench.answer_heartbeat()
    assert bench.core.state == "greeting"


def test_heartbeats_keep_the_lease(leased: Bench) -> None:
    leased.pass_time(10.0, answered=True)
    assert leased.core.state == "leased"
    assert of(StopWork, leased.effects) == []
    assert 19 <= len(leased.sent("beat")) <= 22


def test_command_of_another_epoch_is_fenced(leased: Bench) -> None:
    assert of(Execute, leased.say(leased.generate("c/1", epoch="old.1"))) == []
    assert leased.core.counters.fenced == 1


def test_silence_brings_a_fresh_connection_with_the_same_epoch(leased: Bench) -> None:
    epoch = leased.core.epoch
    leased.say(leased.generate("c/1"))
    leased.pass_time(1.7, answered=False)
    assert len(of(Connect, leased.effects)) == 2
    leased.answer_heartbeat()
    assert leased.core.state == "leased"
    assert leased.core.epoch == epoch
    assert leased.last_heartbeat().running == [("c/1", (1, 1), "client")]
    assert of(StopWork, leased.effects) == []


def test_expired_lease_stops_work_keeps_endings_and_raises_the_epoch(leased: Bench) -> None:
    old = leased.core.epoch
    leased.say(leased.generate("c/1"), leased.generate("c/2"))
    leased.collect(leased.core.ended("finished", FIRST, DONE, leased.now))
    leased.pass_time(2.6, answered=False)
    assert len(of(StopWork, leased.effects)) == 1
    assert leased.core.epoch != old
    leased.pass_time(3.0, answered=True)
    assert leased.core.state == "leased"
    assert leased.last_heartbeat().running == []
    assert leased.last_heartbeat().n_outbox == 1
    resent = leased.sent("finished")[-1]
    assert (resent.rid, resent.epoch) == ("c/1", leased.core.epoch)


def test_late_answer_to_a_heartbeat_of_the_old_epoch_renews_nothing(leased: Bench) -> None:
    old_seq = leased.last_heartbeat().seq
    leased.pass_time(2.6, answered=False)
    leased.say(lease(old_seq))
    assert leased.core.state != "leased"


def test_long_freeze_reads_before_it_judges_silence(leased: Bench) -> None:
    leased.clock.advance(1.9)
    leased.collect(leased.core.tick(leased.now))
    assert len(of(Connect, leased.effects)) == 1
    leased.answer_heartbeat()
    assert leased.core.state == "leased"


def test_copy_of_a_running_command_is_listed_as_accepted_again(leased: Bench) -> None:
    command = leased.generate("c/1")
    assert len(of(Execute, leased.say(command))) == 1
    leased.collect(leased.core.flush(leased.now))
    assert of(Execute, leased.say(command)) == []
    leased.collect(leased.core.flush(leased.now))
    bodies = [unpack(entry) for entry in leased.sent("accepted")]
    assert bodies == [Accepted([("c/1", (1, 1))])] * 2


def test_copy_of_an_ended_command_brings_its_ending_again(leased: Bench) -> None:
    command = leased.generate("c/1")
    leased.say(command)
    leased.collect(leased.core.ended("finished", FIRST, DONE, leased.now))
    assert of(Execute, leased.say(command)) == []
    leased.collect(leased.core.tick(leased.now))
    assert len(leased.sent("finished")) == 2


def test_execution_that_ended_in_its_tick_is_not_accepted(leased: Bench) -> None:
    leased.say(leased.generate("c/1"))
    leased.collect(leased.core.ended("finished", FIRST, DONE, leased.now))
    assert leased.core.flush(leased.now) == []


def test_endings_are_sent_again_until_acknowledged(leased: Bench) -> None:
    leased.say(leased.generate("c/1"))
    leased.collect(leased.core.ended("finished", FIRST, DONE, leased.now))
    leased.pass_time(8.0, answered=True)
    assert len(leased.sent("finished")) == 4  # at 0, 1, 2.5, 4.75 and then 8.1 s
    leased.say(Entry("ack", route="worker:w0", body=pack(Ack([("c/1", (1, 1))]))))
    leased.pass_time(20.0, answered=True)
    assert len(leased.sent("finished")) == 4
    assert leased.last_heartbeat().outbox == []


def test_acknowledged_execution_is_not_repeated(leased: Bench) -> None:
    command = leased.generate("c/1")
    leased.say(command)
    leased.core.ended("finished", FIRST, DONE, leased.now)
    leased.say(Entry("ack", body=pack(Ack([("c/1", (1, 1))]))))
    assert leased.say(command) == []


def test_what_is_over_is_told_to_the_next_router_and_then_no_more(leased: Bench) -> None:
    leased.say(Entry("ack", body=pack(Ack([], ["c/1"]))))
    leased.pass_time(1.0, answered=True)
    assert leased.last_heartbeat().over == []
    leased.collect(leased.core.link_down(leased.now))
    while not any(isinstance(each, Connect) for each in leased.effects[-3:]):
        leased.pass_time(0.05, answered=False)
    assert leased.last_heartbeat().over == ["c/1"]
    leased.answer_heartbeat(2, "r2")
    leased.pass_time(1.0, answered=True)
    assert leased.last_heartbeat().over == []


def test_lower_attempt_is_ignored_and_higher_one_replaces(leased: Bench) -> None:
    leased.say(leased.generate("c/1", 2))
    assert leased.say(leased.generate("c/1", 1)) == []
    effects = leased.say(leased.generate("c/1", 3))
    assert effects[0] == StopSilently([(RequestId("c/1"), (1, 2))])
    assert isinstance(effects[1], Execute)
    assert leased.core.ended("finished", (RequestId("c/1"), (1, 2)), DONE, leased.now) == []


def test_fenced_execution_stops_and_its_ending_is_forgotten(leased: Bench) -> None:
    leased.say(leased.generate("c/1"), leased.generate("c/2"))
    leased.core.ended("finished", (RequestId("c/2"), (1, 1)), DONE, leased.now)
    items = [("c/1", (1, 1)), ("c/2", (1, 1))]
    effects = leased.say(Entry("fenced", body=pack(Fenced(items, "replaced"))))
    assert effects == [StopSilently([FIRST])]
    assert len(leased.core.deliveries.outbox) == 0


def test_request_aborted_before_it_came_ends_without_starting(leased: Bench) -> None:
    leased.core.deliveries.bury(["c/9"], leased.now)
    effects = leased.say(leased.generate("c/9"))
    assert of(Execute, effects) == []
    assert [e.entry.kind for e in effects if isinstance(e, Send)] == ["cancelled"]


def test_unknown_peer_is_answered_with_one_hello(leased: Bench) -> None:
    leased.pass_time(0.3, answered=True)
    gone = Entry("dismissed", body=pack(Dismissed("unknown-peer", "")))
    leased.say(gone, gone, gone)
    assert len(leased.sent("hello")) == 2
    assert leased.core.state == "regreeting"


def test_replaced_member_stops(leased: Bench) -> None:
    effects = leased.say(Entry("dismissed", body=pack(Dismissed("replaced", ""))))
    assert [type(effect) for effect in effects] == [StopWork, Stop]


def test_a_member_that_is_refused_for_good_tells_its_operator_why(leased: Bench) -> None:
    why = Entry("dismissed", body=pack(Dismissed("unreachable", "start it with --advertise")))
    assert Stop("unreachable: start it with --advertise") in leased.say(why)


def test_the_allow_list_is_passed_on_and_its_stamp_repeated_on_the_same_link(leased: Bench) -> None:
    keys = handed([Principal("aa" * 32, "ann", "trainer")])
    (effect,) = leased.say(Entry("allow_list", body=pack(keys)))
    assert isinstance(effect, LetIn)
    assert effect.principals.keys() == {"aa" * 32}
    leased.pass_time(0.6, answered=True)
    assert leased.last_heartbeat().keys == keys.stamp
    leased.collect(leased.core.link_down(leased.now))
    leased.pass_time(1.5, answered=False)
    assert leased.sent("hello")[1:]
    # An older router would not know the field.
    assert leased.last_heartbeat().keys == ""


def test_a_list_that_makes_no_sense_changes_nothing_and_is_counted(leased: Bench) -> None:
    keys = handed([Principal("aa" * 32, "ann", "trainer")])
    broken = HandedKeys(keys.stamp, [*keys.keys, *keys.keys])
    assert leased.say(Entry("allow_list", body=pack(broken))) == []
    assert leased.core.counters.malformed == 1


def test_binding_only_goes_upward(leased: Bench) -> None:
    leased.say(Entry("welcome", body=pack(Welcome(5, "r2", 1, []))))
    seq = leased.last_heartbeat().seq
    leased.say(lease(seq, 1, "r1"))
    assert leased.core.counters.old_routers == 1


def test_hello_names_the_router_obeyed_so_that_a_new_one_can_outrank_it(leased: Bench) -> None:
    leased.pass_time(1.7, answered=False)
    hello = unpack(leased.sent("hello")[-1])
    assert isinstance(hello, Hello)
    assert (hello.router_epoch, hello.router_instance) == (1, "r1")


def test_offline_says_goodbye_and_online_begins_a_new_epoch(leased: Bench) -> None:
    old = leased.core.epoch
    leased.say(leased.generate("c/1"))
    leased.collect(leased.core.offline("engine_crashed", leased.now))
    assert len(leased.sent("goodbye")) == 1
    leased.pass_time(5.0, answered=False)
    assert len(of(Connect, leased.effects)) == 1
    leased.collect(leased.core.online(FACTS, leased.now))
    leased.answer_heartbeat()
    assert leased.core.state == "leased"
    assert leased.core.epoch != old
    assert leased.last_heartbeat().running == []


def test_unknown_command_is_refused(leased: Bench) -> None:
    entry = Entry("paint", "c/1", (1, 1), leased.core.epoch, "client", 1000, body=DONE)
    effects = leased.say(entry)
    assert [e.entry.kind for e in effects if isinstance(e, Send)] == ["refused"]


def test_malformed_control_entry_is_dropped_and_counted(leased: Bench) -> None:
    assert leased.say(Entry("ack", body=pack(Done("x")))) == []
    assert leased.core.counters.malformed == 1


def test_each_lost_link_leads_to_the_next_router_and_one_that_answers_is_kept(
    leased: Bench,
) -> None:
    leased.pass_time(1.7, answered=False)
    assert [each for each in leased.effects if isinstance(each, Connect)][1:] == [Connect(1)]
    leased.answer_heartbeat()
    leased.pass_time(3.0, answered=True)
    leased.collect(leased.core.offline("engine_crashed", leased.now))
    leased.collect(leased.core.online(FACTS, leased.now))
    assert [each for each in leased.effects if isinstance(each, Connect)][2:] == [Connect(1)]
    leased.collect(leased.core.link_down(leased.now))
    leased.pass_time(0.3, answered=False)
    assert [each for each in leased.effects if isinstance(each, Connect)][3:] == [Connect(2)]
