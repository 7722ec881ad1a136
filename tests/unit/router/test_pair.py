"""Of two routers one is active: who takes over, who stands down, and who waits."""

import random

import msgspec
import pytest

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Hello,
    Lease,
    Member,
    Members,
    Welcome,
)
from rolloutbus.router.actor import settings_at
from rolloutbus.router.pair import ASKED_S, UNAWARE_S, Pair, Rank
from rolloutbus.router.settings import PairSettings, RouterSettings
from tests.unit.router.harness import Bus
from tests.unit.router.update_steps import prepare, publish

OTHER = "tcp://10.0.0.1:7777"
TICK_S = 0.05
WORKER = Member("w0", "b.1", "ipc:///s", "ready", 3, "default")
NO_RANK = Rank(has_workers=False, epoch=1)


class Bench:
    """One of two routers, and what it says to the other one."""

    def __init__(self, *, is_first: bool) -> None:
        settings = PairSettings(OTHER + "#" + "ab" * 32, is_first=is_first)
        self.pair = Pair(settings, LeaseSettings(), "b0" * 16, random.Random(0))
        self.now = 1000.0
        self.n_connects = 0
        self.said: list[Entry] = []
        self.own = NO_RANK
        self.collect(self.pair.start(self.now))

    def collect(self, effects: list[Connect | Send]) -> None:
        self.n_connects += sum(isinstance(each, Connect) for each in effects)
        self.said += [each.entry for each in effects if isinstance(each, Send)]

    def hear(self, kind: str, body: msgspec.Struct) -> None:
        self.pair.receive([Entry(kind, body=pack(body))], self.now)

    def hear_active(self, epoch: int = 1, *, has_workers: bool = True) -> None:
        members = [WORKER] if has_workers else []
        self.hear("welcome", Welcome(epoch, "r1", 1, members))

    def hear_standby(self) -> None:
        self.hear("dismissed", Dismissed("standby", "it stands by"))

    def asked_by(self, name: str, role: str = "worker", epoch: int = 0) -> None:
        hello = msgspec.convert(
            {"role": role, "name": name, "boot": "b", "router_epoch": epoch}, Hello
        )
        self.pair.turned_away(hello, self.now)

    def pass_time(self, seconds: float, *, lease: int = 0, standby: bool = False) -> None:
        """Tick; each heartbeat is answered with this epoch, or by a standby, or not at all."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            n_said = len(self.said)
            self.collect(self.pair.tick(self.now, self.own))
            if len(self.said) > n_said and lease:
                self.hear("lease", Lease(lease, "r1", 1))
            elif len(self.said) > n_said and standby:
                self.hear_standby()


@pytest.fixture
def first() -> Bench:
    return Bench(is_first=True)


@pytest.fixture
def second() -> Bench:
    return Bench(is_first=False)


def active(bench: Bench) -> Bench:
    """The same router, which has become active."""
    bench.asked_by("w0")
    bench.pass_time(3.2)
    assert bench.pair.state == "active"
    bench.pair.news = ""
    return bench


def test_it_says_hello_as_a_router_and_names_no_epoch_to_be_outbidden(second: Bench) -> None:
    hello, beat = [unpack(entry) for entry in second.said]
    assert isinstance(hello, Hello)
    assert isinstance(beat, ClientHeartbeat)
    assert (hello.role, hello.router_epoch, hello.router_instance) == ("router", 0, "")


def test_first_router_is_active_when_the_second_stands_by(first: Bench) -> None:
    assert first.pair.state == "asking"
    first.hear_standby()
    first.pass_time(0.1)
    assert first.pair.state == "active"


def test_first_router_is_active_when_no_second_answers(first: Bench) -> None:
    first.pass_time(1.4)
    assert first.pair.state == "asking"
    first.pass_time(0.3)
    assert first.pair.state == "active"


def test_first_router_that_comes_back_stands_by_for_the_one_that_took_over(first: Bench) -> None:
    first.hear_active(epoch=7)
    first.pass_time(2.0, lease=7)
    assert first.pair.state == "standby"
    assert "tcp://10.0.0.1:7777 is active" in first.pair.news


def test_second_router_stands_by_as_long_as_the_first_answers(second: Bench) -> None:
    second.hear_active()
    for _ in range(20):
        second.asked_by("w0")
        second.pass_time(1.0, lease=1)
    assert second.pair.state == "standby"
    second.pass_time(2.4)
    assert second.pair.state == "standby"


def test_second_router_takes_over_when_members_look_for_one_too(second: Bench) -> None:
    second.hear_active(epoch=4)
    second.pass_time(1.0, lease=5)
    second.asked_by("w0", epoch=5)
    second.pass_time(3.2)
    assert second.pair.state == "active"
    assert second.pair.epoch == 6
    assert second.pair.news.startswith("the router at tcp://10.0.0.1:7777 has not answered for 3.")
    assert "w0 asks for one: this one takes over, at router epoch 6" in second.pair.news


def test_its_epoch_is_above_those_that_members_have_obeyed(second: Bench) -> None:
    second.asked_by("w0", epoch=8)
    second.pass_time(3.2)
    assert (second.pair.state, second.pair.epoch) == ("active", 9)


def test_no_one_takes_over_while_members_do_not_look_for_a_router(second: Bench) -> None:
    second.hear_active()
    second.asked_by("client", role="client")
    second.pass_time(60.0)
    assert second.pair.state == "standby"
    second.asked_by("w0")
    second.pass_time(0.1)
    assert second.pair.state == "active"


def test_a_member_that_asked_long_ago_has_found_its_router(second: Bench) -> None:
    second.hear_active()
    second.asked_by("w0")
    second.pass_time(ASKED_S + 1.0, lease=1)
    second.pass_time(10.0)
    assert second.pair.state == "standby"


def test_a_first_router_that_asks_shows_that_it_lives(second: Bench) -> None:
    second.asked_by("w0")
    second.pass_time(2.9)
    second.asked_by("router-x", role="router")
    second.pass_time(1.0)
    assert second.pair.state == "standby"


def test_second_router_leaves_it_to_the_first_while_both_stand_by(second: Bench) -> None:
    for _ in range(10):
        second.asked_by("w0")
        second.pass_time(1.0, standby=True)
    assert second.pair.state == "standby"


def test_first_router_takes_the_fleet_back_from_a_second_that_stands_by(first: Bench) -> None:
    first.hear_active(epoch=3)
    first.pass_time(1.0, lease=3)
    first.hear_standby()
    first.pass_time(0.1)
    assert (first.pair.state, first.pair.epoch) == ("active", 4)


def test_it_does_not_take_over_for_having_been_frozen_itself(second: Bench) -> None:
    second.hear_active()
    second.pass_time(1.0, lease=1)
    second.asked_by("w0")
    second.now += 4.0
    second.asked_by("w0")
    second.pass_time(1.0, lease=1)
    assert second.pair.state == "standby"


@pytest.mark.parametrize(
    ("own", "other", "stays"),
    [
        (Rank(has_workers=True, epoch=1), Rank(has_workers=False, epoch=2), True),
        (Rank(has_workers=False, epoch=2), Rank(has_workers=True, epoch=1), False),
        (Rank(has_workers=True, epoch=1), Rank(has_workers=True, epoch=2), False),
        (Rank(has_workers=True, epoch=2), Rank(has_workers=True, epoch=1), True),
        (Rank(has_workers=False, epoch=1), Rank(has_workers=False, epoch=2), False),
        (Rank(has_workers=True, epoch=2), Rank(has_workers=True, epoch=2), False),
    ],
)
def test_of_two_active_routers_the_lower_one_stands_by(
    second: Bench, own: Rank, other: Rank, *, stays: bool
) -> None:
    active(second).own = own
    second.hear_active(other.epoch, has_workers=other.has_workers)
    second.pass_time(0.1)
    assert second.pair.state == ("active" if stays else "standby")
    assert ("stands by from now on" in second.pair.news) is not stays


def test_of_two_equal_routers_the_first_stays(first: Bench) -> None:
    active(first).own = Rank(has_workers=True, epoch=2)
    first.hear_active(epoch=2)
    first.pass_time(1.0, lease=2)
    assert first.pair.state == "active"


def test_news_of_workers_and_epochs_count_at_once(second: Bench) -> None:
    active(second).own = Rank(has_workers=True, epoch=5)
    second.hear_active(epoch=2, has_workers=False)
    second.hear("members", Members([WORKER]))
    second.pass_time(0.1)
    assert second.pair.state == "active"
    second.hear("lease", Lease(6, "r1", 1))
    second.pass_time(0.1)
    assert second.pair.state == "standby"


def test_a_router_that_stood_down_comes_back_above_both(second: Bench) -> None:
    active(second).own = Rank(has_workers=True, epoch=2)
    second.hear_active(epoch=9)
    second.pass_time(0.1)
    second.asked_by("w0")
    second.pass_time(3.2)
    assert (second.pair.state, second.pair.epoch) == ("active", 10)


def test_members_that_obey_another_router_make_it_stand_by(second: Bench) -> None:
    active(second)
    second.pair.rejected("another router holds this fleet", Rank(has_workers=True, epoch=4))
    assert second.pair.state == "standby"
    assert second.pair.news == "another router holds this fleet; this one stands by from now on"
    assert second.pair.epoch == 5
    second.pass_time(ASKED_S)
    assert second.pair.state == "standby"


def test_an_active_router_that_knows_of_no_standby_is_complained_of_once(second: Bench) -> None:
    second.hear_active()
    second.pass_time(UNAWARE_S + 0.2, lease=1)
    assert "start it with --standby" in second.pair.news
    second.pair.news = ""
    second.pass_time(UNAWARE_S * 2, lease=1)
    assert second.pair.news == ""


def test_one_that_watches_its_standby_is_not_complained_of(second: Bench) -> None:
    second.asked_by("router-x", role="router")
    second.hear_active()
    second.pass_time(UNAWARE_S * 2, lease=1)
    assert second.pair.news == ""


def test_a_mute_link_is_replaced(second: Bench) -> None:
    second.hear_active()
    second.pass_time(1.0, lease=1)
    assert second.n_connects == 1
    second.pass_time(4.0)
    assert second.n_connects in (2, 3)


def test_a_mute_link_is_replaced_though_the_other_router_says_hello(first: Bench) -> None:
    first.hear_active(epoch=3)
    first.pass_time(1.0, lease=3)
    for _ in range(4):  # it was started again, and knows nothing of the old link
        first.asked_by("router-x", role="router")
        first.pass_time(1.0)
    assert first.n_connects >= 2
    first.hear_standby()
    first.pass_time(0.1)
    assert first.pair.state == "active"


def test_a_rejected_first_router_does_not_go_by_what_it_heard_before(first: Bench) -> None:
    first.hear_standby()
    first.pass_time(0.1)
    assert first.pair.state == "active"
    first.pair.rejected("another router holds this fleet", Rank(has_workers=True, epoch=4))
    first.pass_time(1.0)
    assert first.pair.state == "standby"
    first.hear_standby()
    first.pass_time(0.1)
    assert first.pair.state == "active"


def test_a_first_router_that_stood_still_while_it_asked_asks_again(first: Bench) -> None:
    first.pass_time(0.5)
    first.now += 5.0
    first.pass_time(1.4)
    assert first.pair.state == "asking"
    first.pass_time(0.3)
    assert first.pair.state == "active"


def test_a_list_of_other_routers_is_refused() -> None:
    with pytest.raises(SettingsError, match="a router has one other router"):
        PairSettings(f"{OTHER},tcp://10.0.0.3:7777", is_first=False)


def test_a_short_takeover_is_refused() -> None:
    with pytest.raises(SettingsError, match="takeover_s must be at least 2 s"):
        PairSettings(OTHER, is_first=False, takeover_s=0.5)


@pytest.mark.parametrize(("epoch", "is_expected"), [(1, True), (2, False)])
def test_only_the_fleets_first_router_counts_the_workers_that_were_launched_with_it(
    epoch: int, *, is_expected: bool
) -> None:
    launched = {"w0": "default", "removed": "default"}
    own = RouterSettings("ipc:///f", "ipc:///b", expected_workers=launched)
    settings = settings_at(epoch, own)
    bus = Bus(recovered=False, epoch=settings.epoch, expected_workers=settings.expected_workers)
    bus.store()
    worker, client = bus.worker("w0"), bus.client()
    publish(client, require="all")
    assert worker.take("prepare_update") == []
    bus.advance(11)
    if is_expected:
        assert "removed: it was launched and has not joined yet" in client.problem().message
    else:
        assert prepare(worker).version == 1
