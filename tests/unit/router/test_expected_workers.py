"""Who counts where a publication asks for all workers: also those who are not here just now."""

import msgspec
import pytest

from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import (
    FlushCache,
    LoadLora,
    Pause,
    Resume,
    ServerInfo,
    Shutdown,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.membership import Goodbye
from tests.unit.router.harness import Bus, SimClient, SimWorker
from tests.unit.router.update_steps import commit, prepare, publish, published, record


def test_all_waits_for_a_worker_that_was_lost_while_it_prepared() -> None:
    bus = Bus()
    store, quick, frozen = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    publish(client, require="all")
    prepare(quick)
    frozen.is_alive = False
    bus.advance(4)
    assert store.take("record_commit") == []
    assert client.take("finished", "failed", "refused") == []
    quick.end(quick.heard_one("abort_update"), body=Done())
    bus.advance(2)
    assert quick.take("prepare_update") == []  # it is not begun without the other one
    back = bus.worker("w1")
    bus.advance(1)
    prepare(quick)
    prepare(back)
    record(store)
    commit(quick)
    commit(back)
    assert {each.worker: each.is_active for each in published(client).workers} == {
        "w0": True,
        "w1": True,
    }


@pytest.mark.parametrize("require", ["all", "quorum"])
def test_who_was_lost_shortly_before_counts_and_is_named(require: str) -> None:
    bus = Bus()
    bus.store()
    bus.worker("w0")
    lost = bus.worker("w1")
    lost.is_alive = False
    bus.advance(4)
    client = bus.client()
    publish(client, require=require)
    bus.advance(11)
    problem = client.problem()
    assert (problem.code, problem.field) == ("not_ready", "require")
    assert "w1" in problem.message


def test_any_goes_on_and_names_who_is_missing() -> None:
    bus = Bus()
    store, here = bus.store(), bus.worker("w0")
    lost = bus.worker("w1")
    lost.is_alive = False
    bus.advance(4)
    client = bus.client()
    publish(client)
    prepare(here)
    record(store)
    commit(here)
    by_worker = {each.worker: each for each in published(client).workers}
    assert by_worker["w0"].is_active
    assert not by_worker["w1"].is_active
    assert "lost" in by_worker["w1"].problem


def test_who_joined_during_the_update_is_named() -> None:
    bus = Bus()
    store, here, client = bus.store(), bus.worker("w0"), bus.client()
    publish(client, require="all")
    prepare(here)
    bus.worker("w1")
    record(store)
    commit(here)
    by_worker = {each.worker: each for each in published(client).workers}
    assert not by_worker["w1"].is_active
    assert "joined" in by_worker["w1"].problem


def test_who_left_in_good_order_is_not_waited_for() -> None:
    bus = Bus()
    store, here, leaving = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    leaving.say(Entry("goodbye", epoch=leaving.epoch, body=pack(Goodbye("shutdown"))))
    leaving.is_alive = False
    publish(client, require="all")
    prepare(here)
    record(store)
    commit(here)
    assert [each.worker for each in published(client).workers] == ["w0"]


def test_who_stays_away_for_many_leases_is_not_expected_any_more() -> None:
    bus = Bus()
    store, here, lost = bus.store(), bus.worker("w0"), bus.worker("w1")
    lost.is_alive = False
    bus.advance(40)
    client = bus.client()
    publish(client, require="all")
    prepare(here)
    record(store)
    commit(here)
    assert [each.worker for each in published(client).workers] == ["w0"]


def test_a_launched_worker_counts_before_it_was_ever_seen() -> None:
    bus = Bus(expected_workers={"w0": "default", "w1": "default"})
    bus.store()
    first, client = bus.worker("w0"), bus.client()
    publish(client, require="all")
    bus.advance(9)
    assert first.take("prepare_update") == []
    second = bus.worker("w1")
    bus.advance(1)
    assert prepare(first).version == prepare(second).version == 1


def test_all_waits_until_a_new_router_knows_who_there_is() -> None:
    bus = Bus(recovered=False)
    bus.store()
    first, client = bus.worker("w0"), bus.client()
    publish(client, require="all")
    bus.advance(1)
    assert first.take("prepare_update") == []
    second = bus.worker("w1")
    bus.advance(4)
    assert prepare(first).version == prepare(second).version == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("sleep", Sleep(["weights"])),
        ("wake_up", WakeUp(["weights"])),
        ("flush_cache", FlushCache()),
        ("load_lora", LoadLora("math", 1, "adapters/math")),
        ("unload_lora", UnloadLora("math")),
        ("start_profile", StartProfile()),
        ("stop_profile", StopProfile()),
        ("shutdown", Shutdown()),
    ],
)
def test_a_command_names_the_workers_that_miss_it(kind: str, body: msgspec.Struct) -> None:
    bus = Bus(expected_workers={"w0": "default", "w1": "default", "w2": "other"})
    here, lost, client = bus.worker("w0"), bus.worker("w1"), bus.client()
    lost.is_alive = False
    bus.advance(4)
    client.ask(kind, body, "fleet")
    here.end(here.heard_one(kind), body=Done())
    outcome = client.outcome()
    assert [each.worker for each in outcome.results] == ["w0"]
    assert sorted(outcome.silent) == ["w1", "w2"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("pause", Pause()),  # those who join are paused
        ("load_lora", LoadLora("math", 1)),  # and get what the store keeps
        ("server_info", ServerInfo()),  # nothing is missed
    ],
)
def test_but_not_if_they_do_not_miss_anything(kind: str, body: msgspec.Struct) -> None:
    bus = Bus(expected_workers={"w0": "default", "w1": "default"})
    here, client = bus.worker("w0"), bus.client()
    client.ask(kind, body, "fleet")
    here.end(here.heard_one(kind), body=Done())
    assert client.outcome().silent == []


@pytest.mark.parametrize(("kind", "body"), [("pause", Pause()), ("resume", Resume())])
def test_who_is_lost_while_the_fleet_pauses_is_no_error(kind: str, body: msgspec.Struct) -> None:
    bus = Bus()
    here, dead, client = bus.worker("w0"), bus.worker("w1"), bus.client()
    dead.is_alive = False
    client.ask(kind, body, "fleet")
    here.end(here.heard_one(kind), body=Done())
    bus.advance(4)
    outcome = client.outcome()
    assert ([each.worker for each in outcome.results], outcome.silent) == (["w0"], [])


def test_who_lives_and_does_not_pause_is_named() -> None:
    bus = Bus()
    here, mute, client = bus.worker("w0"), bus.worker("w1"), bus.client()
    client.ask("pause", Pause(), "fleet")
    here.end(here.heard_one("pause"), body=Done())
    mute.heard_one("pause")
    bus.advance(40)
    assert client.outcome().silent == ["w1"]


def test_a_command_to_one_worker_names_no_other() -> None:
    bus = Bus(expected_workers={"w0": "default", "w1": "default"})
    here, client = bus.worker("w0"), bus.client()
    client.ask("sleep", Sleep(["weights"]), "worker:w0")
    here.end(here.heard_one("sleep"), body=Done())
    assert client.outcome().silent == []


def fleet_of_two() -> tuple[Bus, SimWorker, SimWorker, SimClient]:
    bus = Bus(expected_workers={"w0": "default", "w1": "default"})
    return bus, bus.worker("w0"), bus.worker("w1"), bus.client()


def absent(bus: Bus) -> list[str]:
    return sorted(bus.core.status(bus.now).absent)


def test_a_worker_that_dies_while_it_leaves_is_not_expected_back() -> None:
    bus, _, leaving, client = fleet_of_two()
    client.ask("shutdown", Shutdown(), "worker:w1")
    leaving.heard_one("shutdown")
    leaving.is_alive = False
    bus.advance(4)
    assert client.outcome().silent == ["w1"]
    assert absent(bus) == []


def test_a_worker_that_is_away_is_given_up_by_a_shutdown() -> None:
    bus, _, lost, client = fleet_of_two()
    lost.is_alive = False
    bus.advance(4)
    assert absent(bus) == ["w1"]
    client.ask("shutdown", Shutdown(), "worker:w1")
    (outcome,) = client.outcome().results
    assert (outcome.worker, outcome.kind) == ("w1", "finished")
    assert absent(bus) == []
    client.ask("shutdown", Shutdown(), "worker:w1")
    assert client.problem().code == "unknown_worker"


def test_a_worker_that_comes_back_is_waited_for_until_it_is_given_up() -> None:
    bus, _, leaving, client = fleet_of_two()
    client.ask("shutdown", Shutdown(comes_back=True), "worker:w1")
    told = unpack_as(Shutdown, leaving.heard_one("shutdown"))
    assert told == Shutdown(), "workers of the release before know no such field"
    leaving.say(Entry("goodbye", epoch=leaving.epoch, body=pack(Goodbye("shutdown"))))
    leaving.is_alive = False
    bus.advance(100)
    assert absent(bus) == ["w1"]
    client.ask("shutdown", Shutdown(comes_back=True), "worker:w1")
    assert client.problem().code == "unknown_worker"
    assert absent(bus) == ["w1"]
    bus.worker("w1")
    assert absent(bus) == []
