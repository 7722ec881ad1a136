"""Labels of versions: written down with the commit, and kept as long as they may be asked for."""

from rolloutbus.bus.wire.limits import MAX_TAGS
from rolloutbus.bus.wire.messages.weights import RecordCommit
from rolloutbus.trainer_adapter.store.versions import CommitRecord, VersionTable
from tests.unit.trainer_adapter.store.harness import StoreCoreHarness


def _publish(store: StoreCoreHarness, tag: int | None) -> int:
    version = store.seal("default")
    store.say(RecordCommit("default", version, tag=tag))
    return version


def _read_again(
    table: VersionTable, *, is_shortened: bool, store: StoreCoreHarness
) -> VersionTable:
    again = VersionTable()
    again.restore(table.snapshot() if is_shortened else store.records)
    return again


def test_a_label_is_in_the_record_of_the_commit() -> None:
    store = StoreCoreHarness()
    version = _publish(store, 100)
    assert CommitRecord("default", version, tag=100) in store.records
    assert store.table.tags == {"default": [(version, 100)]}


def test_labels_survive_the_store_and_the_shortening_of_its_record() -> None:
    store = StoreCoreHarness()
    for tag in (10, None, 20):
        _publish(store, tag)
    for _ in range(300):  # more than the history has room for
        _publish(store, None)
    for is_shortened in (False, True):
        again = _read_again(store.table, is_shortened=is_shortened, store=store)
        assert again.tags == {"default": [(1, 10), (3, 20)]}
        assert again.committed == {"default": 303}


def test_the_latest_labels_are_kept() -> None:
    store = StoreCoreHarness()
    for tag in range(100):
        _publish(store, tag)
    tags = store.table.tags["default"]
    assert [tag for _, tag in tags] == list(range(100 - MAX_TAGS, 100))
