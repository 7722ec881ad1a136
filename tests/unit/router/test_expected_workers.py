"""Who counts where a publication asks for all workers: also those who are not here just now."""

import pytest

from bus.codec import pack
from bus.entry import Entry
from bus.messages.endings import Done
from bus.messages.membership import Goodbye
from tests.unit.router.harness import Bus
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
