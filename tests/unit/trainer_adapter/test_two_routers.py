"""A client keeps the router it obeys while that one lives, and says so to a second one."""

from rolloutbus.bus.actor.effects import Connect
from rolloutbus.bus.wire.messages.membership import Dismissed, Hello, Lease, Rejected, Welcome
from tests.unit.trainer_adapter.bench import Bench


def _answered(bench: Bench) -> None:
    """The router obeyed has answered a heartbeat."""
    bench.router_answers_heartbeats = False
    bench.take("client_beat")
    bench.pass_time(0.6)
    bench.say("lease", Lease(1, "r1", 2))


def _reconnect(bench: Bench) -> None:
    bench.apply(bench.core.link_down(bench.clock.now()))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)


def test_hello_names_the_router_that_was_obeyed(bench: Bench) -> None:
    _reconnect(bench)
    (hello,) = bench.bodies("hello", Hello)
    assert (hello.router_epoch, hello.router_instance) == (1, "r1")


def test_next_router_is_obeyed(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, [], up_ms=10))
    assert bench.take("rejected") == []
    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_router_that_ran_beside_the_one_obeyed_is_rejected(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, [], up_ms=60_000))
    assert bench.bodies("rejected", Rejected) == [Rejected(1, "r1")]
    bench.say("cancelled", rid=rid)
    assert rid not in bench.outcomes
    assert bench.take("generate") == []


def test_router_of_an_equal_epoch_is_rejected(bench: Bench) -> None:
    _reconnect(bench)
    bench.say("welcome", Welcome(1, "r2", 1, []))
    assert bench.bodies("rejected", Rejected) == [Rejected(1, "r1")]


def test_client_is_back_at_its_router_after_a_rejection(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    _reconnect(bench)
    bench.say("welcome", Welcome(2, "r2", 1, [], up_ms=60_000))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)
    bench.take("generate")
    bench.welcome()
    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_a_rejected_router_that_stays_is_followed_once_its_own_is_silent(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    _reconnect(bench)
    bench.take("generate")
    give_up_at = bench.clock.now() + 60.0
    while not bench.take("generate"):
        bench.say("welcome", Welcome(2, "r2", 1, [], up_ms=60_000))
        bench.pass_time(0.2)
        assert bench.clock.now() < give_up_at, "it was never followed"
    assert len(bench.bodies("rejected", Rejected)) > 1
    assert rid not in bench.outcomes


def test_client_goes_on_from_a_standby_to_the_next_router(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    _reconnect(bench)
    bench.say("dismissed", Dismissed("standby", "it stands by"))
    assert bench.core.is_at_standby
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)
    assert [each.n_lost for each in bench.effects if isinstance(each, Connect)] == [0, 1, 2]
    bench.take("generate")
    bench.welcome()
    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_client_whose_router_stands_down_follows_one_that_ran_beside_it(bench: Bench) -> None:
    rid = bench.generate()
    _answered(bench)
    bench.say("dismissed", Dismissed("standby", "it stands by"))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, [], up_ms=60_000))
    assert bench.take("rejected") == []
    assert [entry.rid for entry in bench.take("generate")] == [rid]
