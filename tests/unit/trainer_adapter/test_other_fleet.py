"""A new fleet at an old address does not go unnoticed."""

from bus.entry import Placement
from bus.errors import OtherFleet
from bus.messages.generation import Generate, Sampling
from bus.messages.membership import Members, Welcome
from tests.unit.trainer_adapter.bench import Bench, ints
from trainer_adapter.requests import Ask


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
