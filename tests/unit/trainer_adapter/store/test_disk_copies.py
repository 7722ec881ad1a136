from rolloutbus.bus.wire.messages.weights import Manifest, Offer, PullManifest, RecordCommit
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.effects import RemoveFiles, StoreEffect, WriteFiles
from tests.unit.trainer_adapter.store.desk import Desk, answer_of, released


def slow_desk(**settings: object) -> Desk:
    desk = Desk(disk="/weights", **settings)
    desk.holds_files = True
    return desk


def offers(desk: Desk, version: int) -> list[Offer]:
    manifest = answer_of(desk.say(PullManifest("default", version), by_bulk=True))
    assert isinstance(manifest, Manifest)
    return manifest.offers


def writes(effects: list[StoreEffect]) -> list[int]:
    return [each.key[1] for each in effects if isinstance(each, WriteFiles)]


def test_a_sealed_version_is_offered_as_being_written_then_at_its_place() -> None:
    desk = slow_desk()
    desk.seal()
    assert offers(desk, 1) == [Offer("disk", "")]
    desk.core.files_written("default/1")
    assert offers(desk, 1) == [Offer("disk", "default/1")]


def test_files_that_cannot_be_written_are_not_offered() -> None:
    desk = slow_desk()
    desk.seal()
    desk.core.files_written("")
    assert offers(desk, 1) == []


def test_without_a_disk_nothing_is_written_or_offered() -> None:
    desk = Desk()
    desk.seal()
    assert offers(desk, 1) == []


def test_a_slow_disk_gets_the_newest_version_and_the_ones_between_are_skipped() -> None:
    desk = slow_desk()
    for _ in range(4):
        desk.publish()
    assert writes(desk.core.files_written("default/1")) == [4]
    assert [offers(desk, each) for each in (2, 3)] == [[], []]
    assert writes(desk.core.files_written("default/4")) == []


def test_a_version_is_kept_while_it_is_written() -> None:
    desk = slow_desk(keep_committed=1)
    desk.publish()
    assert released(desk.say(RecordCommit("default", desk.seal()))) == []
    desk.core.files_written("default/1")
    gone = desk.core.tick(desk.now)
    assert released(gone) == ["segment1"]
    assert RemoveFiles(("default", 1)) in gone


def test_a_store_that_starts_writes_what_is_in_use_and_not_yet_on_disk() -> None:
    desk = Desk()
    desk.publish(n=2)
    again = StoreCore(slow_desk().settings, "host", desk.table)
    assert writes(again.opened()) == [2]
