from rolloutbus.bus.wire.messages.weights import Manifest, Offer, PullManifest, RecordCommit
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.effects import RemoveFiles, StoreEffect, WriteFiles
from tests.unit.trainer_adapter.store.harness import StoreCoreHarness, answer_of, released


def slow_desk(**settings: object) -> StoreCoreHarness:
    store = StoreCoreHarness(disk="/weights", **settings)
    store.holds_files = True
    return store


def offers(store: StoreCoreHarness, version: int) -> list[Offer]:
    manifest = answer_of(store.say(PullManifest("default", version), by_bulk=True))
    assert isinstance(manifest, Manifest)
    return manifest.offers


def writes(effects: list[StoreEffect]) -> list[int]:
    return [each.key[1] for each in effects if isinstance(each, WriteFiles)]


def test_a_sealed_version_is_offered_as_being_written_then_at_its_place() -> None:
    store = slow_desk()
    store.seal()
    assert offers(store, 1) == [Offer("disk", "")]
    store.core.files_written("default/1")
    assert offers(store, 1) == [Offer("disk", "default/1")]


def test_files_that_cannot_be_written_are_not_offered() -> None:
    store = slow_desk()
    store.seal()
    store.core.files_written("")
    assert offers(store, 1) == []


def test_what_could_not_be_written_is_counted_until_a_later_version_is() -> None:
    store = slow_desk()
    store.publish()
    assert store.core.n_unwritten == 0
    store.core.files_written("")
    store.publish()
    store.core.files_written("")
    assert store.core.n_unwritten == 2
    store.publish()
    store.core.files_written("default/3")
    assert store.core.n_unwritten == 0


def test_without_a_disk_nothing_is_written_or_offered() -> None:
    store = StoreCoreHarness()
    store.seal()
    assert offers(store, 1) == []


def test_a_slow_disk_gets_the_newest_version_and_the_ones_between_are_skipped() -> None:
    store = slow_desk()
    for _ in range(4):
        store.publish()
    assert writes(store.core.files_written("default/1")) == [4]
    assert [offers(store, each) for each in (2, 3)] == [[], []]
    assert writes(store.core.files_written("default/4")) == []


def test_a_version_is_kept_while_it_is_written() -> None:
    store = slow_desk(keep_committed=1)
    store.publish()
    assert released(store.say(RecordCommit("default", store.seal()))) == []
    store.core.files_written("default/1")
    gone = store.core.tick(store.now)
    assert released(gone) == ["segment1"]
    assert RemoveFiles(("default", 1)) in gone


def test_a_store_that_starts_writes_what_is_in_use_and_not_yet_on_disk() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    again = StoreCore(slow_desk().settings, "host", store.table)
    assert writes(again.opened()) == [2]
