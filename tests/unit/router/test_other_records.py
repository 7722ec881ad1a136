"""A store whose record ends before what the fleet has: numbers of versions go on above that."""

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.weights import ReserveVersion, RestoreVersion, Tensor
from tests.unit.router.harness import Bus, SimClient, SimStore
from tests.unit.router.update_steps import commit, prepare, publish, published, record

TENSORS = [Tensor("w", "F32", (1,), 0, 4)]


def _reserve(client: SimClient, store: SimStore, policy: str = "default") -> ReserveVersion:
    """Returns what the store is asked for."""
    client.ask("reserve_version", ReserveVersion(policy, TENSORS), route="store")
    asked = unpack(store.heard_one("reserve_version"))
    assert isinstance(asked, ReserveVersion)
    return asked


def test_a_store_with_an_empty_record_is_told_what_another_one_has_committed() -> None:
    bus = Bus()
    former, client = bus.store({"default": 2}), bus.client()
    assert _reserve(client, former) == ReserveVersion("default", TENSORS)
    former.is_alive = False
    store = bus.store()
    assert _reserve(client, store) == ReserveVersion("default", TENSORS, above=2)
    assert _reserve(client, store, "judge") == ReserveVersion("judge", TENSORS)


def test_it_is_told_so_for_the_content_of_a_version_that_it_still_keeps() -> None:
    bus = Bus()
    bus.store({"default": 5}).is_alive = False
    store, client = bus.store({"default": 2}), bus.client()
    client.ask("restore_version", RestoreVersion("default", 1), route="store")
    assert unpack(store.heard_one("restore_version")) == RestoreVersion("default", 1, above=5)


def test_a_store_that_comes_later_is_told_it_too() -> None:
    bus = Bus()
    bus.store({"default": 2}).is_alive = False
    bus.advance(4)
    client = bus.client()
    client.ask("reserve_version", ReserveVersion("default", TENSORS), route="store")
    store = bus.store()
    bus.advance(0.5)
    asked = unpack(store.heard_one("reserve_version"))
    assert asked == ReserveVersion("default", TENSORS, above=2)


@pytest.mark.parametrize("policy", ["default", "default.poet"])
def test_it_is_told_what_workers_have_when_no_record_names_it(policy: str) -> None:
    bus = Bus(recovered=False)
    store, client = bus.store(), bus.client()
    bus.worker(version=5, adapters={"poet": 5})
    bus.advance(5)
    assert _reserve(client, store, policy) == ReserveVersion(policy, TENSORS, above=5)


def test_what_the_store_has_recorded_itself_it_is_not_told() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    prepare(worker)
    record(store)
    commit(worker)
    assert published(client).version == 1
    assert _reserve(client, store) == ReserveVersion("default", TENSORS)


@pytest.mark.parametrize("version", [1, 2])
def test_a_number_that_another_store_gave_before_is_not_taken_for_the_same_version(
    version: int,
) -> None:
    bus = Bus()
    bus.store({"default": 2}).is_alive = False
    bus.store()
    worker, client = bus.worker(version=2), bus.client()
    publish(client, version)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("stale_version", "not_started")
    assert "publish once more" in problem.message
    assert worker.take("prepare_update") == []


def test_a_number_that_only_a_worker_attests_is_not_taken_for_the_same_version() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(version=1), bus.client()
    publish(client, 1)
    assert client.problem().code == "stale_version"
    assert worker.take("prepare_update") == []
