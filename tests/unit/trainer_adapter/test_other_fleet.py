"""A new fleet at an old address does not go unnoticed."""

import random
from typing import cast

import msgspec
import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.errors import DeadlineExceeded, OtherFleet, RequestCancelled
from rolloutbus.bus.wire.messages.control import LoadLora, Status
from rolloutbus.bus.wire.messages.generation import (
    Attach,
    CloseSession,
    Generate,
    OpenedSession,
    OpenSession,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import Lease, Members, Welcome
from rolloutbus.bus.wire.messages.weights import (
    PublishVersion,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    SettleVersion,
    VerifyTensors,
)
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged, Stopped, Welcomed
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.unit.trainer_adapter.bench import BOOT, Bench, ints


def _reconnect(bench: Bench) -> None:
    bench.apply(bench.core.link_down(bench.clock.now()))
    n_connects = bench.n_connects
    while bench.n_connects == n_connects:
        bench.pass_time(0.05)


def _asked(bench: Bench, versions: str) -> str:
    body = Generate(ints(1, 2, 3), SamplingParams(max_new_tokens=8))
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


def _at_a_nameless_router(bench: Bench) -> None:
    """Another router welcomes the client, which knows fleet x, and does not say what it serves."""
    bench.say("members", Members([], fleet="x"))
    _move(bench, "r2", "")
    bench.sent.clear()


def _begun(bench: Bench, *, session: str = "") -> str:
    """A request of which one token has come."""
    body = Generate(ints(1, 2, 3), SamplingParams(max_new_tokens=8))
    ask = Ask("generate", body, place=Placement("default", session=session))
    rid, effects = bench.core.submit(ask, 60.0, bench.clock.now())
    bench.apply(effects)
    bench.accept(rid, (1, 1))
    bench.row(rid, (1, 1), 0, 7)
    return rid


def test_tokens_do_not_go_to_a_router_that_may_serve_another_fleet(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    begun, fresh = _begun(bench), _asked(bench, "any")
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(2, "r2", 1, []))
    assert [entry.rid for entry in bench.take("generate")] == [fresh]
    bench.say("members", Members([], fleet="y"))
    assert isinstance(bench.outcomes[begun], OtherFleet)
    bench.pass_time(10)
    assert begun not in [entry.rid for entry in bench.take("generate")]


def test_news_of_a_router_whose_welcome_was_lost_are_not_those_of_the_former_one(
    bench: Bench,
) -> None:
    bench.say("members", Members([], fleet="x"))
    begun = _begun(bench)
    _reconnect(bench)
    bench.say("members", Members([], fleet="y"))
    assert begun not in bench.outcomes
    bench.say("welcome", Welcome(2, "r2", 1, [], fleet="y"))
    assert isinstance(bench.outcomes[begun], OtherFleet)


def test_what_was_held_back_goes_on_once_the_router_names_the_same_fleet(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    begun, pinned = _begun(bench), _asked(bench, "min:124")
    _move(bench, "r2", "")
    later = _asked(bench, "exact:7")
    bench.pass_time(3)
    assert bench.take("generate")[2:] == []  # the two that were sent to the first router
    assert bench.core.counters.held_back == 3
    bench.say("members", Members([], fleet="x"))
    sent = bench.take("generate")
    assert [(each.rid, each.place is not None and each.place.resend) for each in sent] == [
        (begun, True),
        (pinned, True),
        (later, False),
    ]
    prefix = cast("Generate", unpack(sent[0])).prefix
    assert prefix is not None
    assert prefix.tokens == ints(7)


def test_sessions_and_their_turns_wait_until_the_router_names_the_fleet(bench: Bench) -> None:
    rid = bench.command("open_session", OpenSession("agent"))
    bench.say("finished", OpenedSession("w0"), rid=rid)
    _at_a_nameless_router(bench)
    turn = _begun(bench, session="agent")
    closing = bench.command("close_session", CloseSession("agent"), deadline_s=30.0)
    renewing = bench.command("open_session", OpenSession("agent", worker="w0"), deadline_s=30.0)
    opening = bench.command("open_session", OpenSession("another"))
    kinds = ("open_session", "close_session", "generate")
    assert [each.rid for each in bench.sent if each.kind in kinds] == [opening]
    bench.sent.clear()
    bench.say("members", Members([], fleet="x"))
    reopened, *rest = [each for each in bench.sent if each.kind in kinds]
    assert cast("OpenSession", unpack(reopened)) == OpenSession("agent", worker="w0")
    assert [each.rid for each in rest] == [turn, closing, renewing]


def test_a_turn_of_a_session_does_not_go_on_at_another_fleet(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    body = Generate(ints(1, 2, 3), SamplingParams(max_new_tokens=8))
    ask = Ask("generate", body, place=Placement("default", session="agent"))
    rid, effects = bench.core.submit(ask, 60.0, bench.clock.now())
    bench.apply(effects)
    _move(bench, "r2", "y")
    assert isinstance(bench.outcomes[rid], OtherFleet)


@pytest.mark.parametrize(
    ("kind", "body", "route"),
    [
        ("reserve_version", ReserveVersion("default", []), "store"),
        ("verify_tensors", VerifyTensors("default", 7, [0], [1]), "store"),
        ("seal_version", SealVersion("default", 7, []), "store"),
        ("settle_version", SettleVersion("default", 7), "store"),
        ("restore_version", RestoreVersion("default", 7), "store"),
        ("publish_version", PublishVersion("default", 7), ""),
        ("load_lora", LoadLora("math", 7, bulk="ipc:///bulk"), "worker:w0"),
        ("attach", Attach(), ""),
    ],
)
def test_commands_about_what_a_fleet_has_begun_wait_for_its_name(
    bench: Bench, kind: str, body: msgspec.Struct, route: str
) -> None:
    _at_a_nameless_router(bench)
    rid = bench.command(kind, body, route=route)
    assert bench.take(kind) == []
    bench.say("members", Members([], fleet="x"))
    assert [entry.rid for entry in bench.take(kind)] == [rid]


def test_the_deadline_of_what_is_held_back_says_why(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    begun = _begun(bench)
    _move(bench, "r2", "")
    fresh = _asked(bench, "min:124")
    bench.router_answers_heartbeats = True
    for _ in range(62 * 20):
        bench.clock.advance(0.05)
        bench.apply(bench.core.tick(bench.clock.now()))
        bench.say("lease", Lease(2, "r2", 1))
    for rid, outcome in ((begun, "unknown"), (fresh, "not_started")):
        error = bench.outcomes[rid]
        assert isinstance(error, DeadlineExceeded)
        assert "fleet x" in str(error)
        assert error.outcome == outcome


def test_a_caller_may_abort_what_is_held_back(bench: Bench) -> None:
    _at_a_nameless_router(bench)
    rid = _asked(bench, "min:124")
    assert bench.abort(rid) == 1
    assert isinstance(bench.outcomes[rid], RequestCancelled)


def test_a_fresh_connection_to_the_same_router_waits_for_nothing(bench: Bench) -> None:
    bench.say("members", Members([], fleet="x"))
    pinned = _asked(bench, "min:124")
    _reconnect(bench)
    bench.take("generate")
    bench.say("welcome", Welcome(1, "r1", 1, [], fleet="x"))
    assert [entry.rid for entry in bench.take("generate")] == [pinned]


def test_a_client_that_expects_a_fleet_sends_nothing_before_it_is_named(bench: Bench) -> None:
    settings = ClientSettings(name="c", router="ipc:///nowhere", fleet="x")
    bench.core = ClientCore(settings, BOOT, random.Random(0))
    bench.apply(bench.core.start(bench.clock.now()))
    bench.say("welcome", Welcome(1, "r1", 1, [], fleet="x"))
    _move(bench, "r2", "")
    bench.effects.clear()
    rid = _asked(bench, "any")
    status = bench.command("status", Status())
    assert [each.rid for each in bench.take("generate") + bench.take("status")] == [status]
    assert Welcomed(2) not in bench.effects
    bench.say("members", Members([], fleet="x"))
    assert [each.rid for each in bench.take("generate")] == [rid]
    assert Welcomed(2) in bench.effects
