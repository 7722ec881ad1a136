"""Success rules of publications."""

import pytest

from tests.unit.router.harness import Bus
from tests.unit.router.update_steps import (
    commit,
    fail_to_prepare,
    prepare,
    publish,
    published,
    record,
)


def test_unknown_rule_is_refused_by_its_field() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(), bus.client()
    publish(client, require="at-least:0")
    problem = client.problem()
    assert (problem.code, problem.field) == ("bad_request", "require")
    assert worker.take("prepare_update") == []


@pytest.mark.parametrize(
    ("require", "is_kept"), [("any", True), ("at-least:2", True), ("quorum", True), ("all", False)]
)
def test_two_of_three(require: str, is_kept: bool) -> None:
    bus = Bus()
    store, client = bus.store(), bus.client()
    workers = [bus.worker(f"w{n}") for n in range(3)]
    publish(client, require=require)
    for worker in workers[1:]:
        prepare(worker)
    fail_to_prepare(workers[0])
    if is_kept:
        record(store)
        commit(workers[1])
        commit(workers[2])
        assert [each.is_active for each in published(client).workers] == [False, True, True]
    else:
        assert client.ending() == ("failed", "update_failed")
        assert all(len(worker.take("abort_update")) == 1 for worker in workers)


def test_worker_that_never_answers_leaves_the_others_time_to_commit() -> None:
    bus = Bus()
    store, client = bus.store(), bus.client()
    prompt, mute = bus.worker("w0"), bus.worker("w1")
    publish(client, require="any")  # it has 30 s
    prepare(prompt)
    mute.accept(mute.heard_one("prepare_update"))
    bus.advance(26.5)
    assert store.take("record_commit") == []
    bus.advance(0.5)
    record(store)
    bus.advance(1)
    commit(prompt)
    problems = {each.worker: each.problem for each in published(client).workers}
    assert problems == {"w0": "", "w1": "silent during prepare_update"}


def test_worker_that_is_late_to_prepare_is_not_waited_for_again() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(), bus.client()
    publish(client)  # it has 30 s
    worker.accept(worker.heard_one("prepare_update"))
    bus.advance(27.5)
    assert client.ending() == ("failed", "update_failed")
    assert worker.take("prepare_update") == []


def test_rule_that_needs_more_workers_than_there_are_waits_for_them() -> None:
    bus = Bus()
    bus.store()
    first, client = bus.worker("w0"), bus.client()
    publish(client, require="at-least:2")
    bus.advance(1)
    assert first.take("prepare_update") == []
    second = bus.worker("w1")
    bus.advance(1)
    assert prepare(first).version == prepare(second).version == 1


def test_and_is_refused_if_they_do_not_come() -> None:
    bus = Bus()
    bus.store()
    bus.worker("w0")
    client = bus.client()
    publish(client, require="at-least:2")
    bus.advance(12)
    problem = client.problem()
    assert (problem.code, problem.field) == ("not_ready", "require")
