"""A new fleet at an old address does not go unnoticed."""

import random

import pytest

from rolloutbus.bus.entry import Placement
from rolloutbus.bus.errors import OtherFleet
from rolloutbus.bus.messages.generation import Generate, Sampling
from rolloutbus.bus.messages.membership import Members, Welcome
from rolloutbus.bus.messages.weights import RestoreVersion, SettleVersion
from rolloutbus.trainer_adapter.client_core import ClientCore
from rolloutbus.trainer_adapter.effects import FleetChanged, Stopped, Welcomed
from rolloutbus.trainer_adapter.requests import Ask
from rolloutbus.trainer_adapter.settings import ClientSettings
from tests.unit.trainer_adapter.bench import BOOT, Bench, ints


def _reconnect(bench: Bench) -> None:
    bench.apply(bench.core.link_down(bench.clock.now()))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)


def _asked(bench: Bench, versions: str) -> str:
    body = Generate(ints(1, 2, 3), Sampling(max_new_tokens=8))
    ask = Ask("generate", body, place=Placement("default", versions))
    rid, effects = bench.core.submit(ask, 60.0, bench.clock.now())
    bench.apply(effects)
    return rid


def test_another_fleet_ends_what_names_a_version_of_the_former(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    pinned, newest = _asked(bench, "min:124"), _asked(bench, "latest")
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, [], fleet="y"))
    assert isinstance(bench.outcomes[pinned], OtherFleet)
    assert [entry.rid for entry in bench.take("generate")] == [newest]
    assert (bench.core.fleet, bench.core.counters.fleets_changed) == ("y", 1)


def test_the_same_fleet_under_another_router_is_no_other_one(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    pinned = _asked(bench, "min:124")
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, []))
    bench.say("members", Members([], fleet="x"))
    assert [entry.rid for entry in bench.take("generate")] == [pinned]
    assert bench.core.counters.fleets_changed == 0


def test_a_router_may_learn_its_fleets_older_name(bench: Bench) -> None:
    bench.say("members", Members([], fleet="r1"))
    bench.say("members", Members([], fleet="x"))
    assert (bench.core.fleet, bench.core.counters.fleets_changed) == ("x", 0)


def _move(bench: Bench, instance: str, fleet: str) -> None:
    _reconnect(bench)
    bench.say("welcome", Welcome(int(instance[1:]), instance, 1, [], fleet=fleet))


@pytest.mark.parametrize("versions", ["min:124", "exact:124", "max-staleness:1"])
def test_what_names_a_version_is_told_until_the_caller_accepts(bench: Bench, versions: str) -> None:
    bench.say("members", Members([], fleet="x"))
    _move(bench, "r2", "y")
    assert bench.core.other_fleet == FleetChanged("x", "y")
    assert FleetChanged("x", "y") in bench.effects
    for _ in range(2):
        with pytest.raises(OtherFleet, match=r"fleet y answers.*was x.*accept_fleet") as caught:
            _asked(bench, versions)
        assert caught.value.outcome == "not_started"
    for served in ("any", "latest", "min:0"):
        _asked(bench, served)
    bench.core.accept_fleet()
    assert bench.core.other_fleet is None
    _asked(bench, versions)
    assert len(bench.take("generate")) == 4


def test_versions_of_the_former_fleet_are_not_settled_or_restored(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    rid = bench.command("settle_version", SettleVersion("default", 7), route="store")
    _move(bench, "r2", "y")
    assert isinstance(bench.outcomes[rid], OtherFleet)
    with pytest.raises(OtherFleet):
        bench.core.require_known_fleet()
    with pytest.raises(OtherFleet):
        bench.command("restore_version", RestoreVersion("default", 7), route="store")


def test_the_former_fleet_may_come_back(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    _move(bench, "r2", "y")
    _move(bench, "r3", "x")
    assert bench.core.other_fleet is None
    _asked(bench, "min:124")


def test_a_name_that_gives_way_to_the_former_one_is_no_change(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    _move(bench, "r2", "r2")
    bench.say("members", Members([], fleet="x"))
    assert bench.core.other_fleet is None
    _asked(bench, "min:124")


@pytest.mark.parametrize(("fleet", "is_welcome"), [("x", True), ("y", False)])
def test_a_client_that_expects_a_fleet_takes_no_other_one(
    bench: Bench, fleet: str, *, is_welcome: bool
) -> None:
    bench.effects.clear()
    settings = ClientSettings(name="c", router="ipc:///nowhere", fleet="x")
    bench.core = ClientCore(settings, BOOT, random.Random(0))
    bench.apply(bench.core.start(bench.clock.now()))
    bench.say("welcome", Welcome(1, "r1", 1, []))  # a recovering router does not know yet
    assert not any(isinstance(each, Welcomed | Stopped) for each in bench.effects)
    bench.say("members", Members([], fleet=fleet))
    assert any(isinstance(each, Welcomed) for each in bench.effects) == is_welcome
    if not is_welcome:
        with pytest.raises(OtherFleet, match=r"fleet y answers.*, not x"):
            _asked(bench, "any")
