"""Zeros that were meant, or were committed once, are no reason to refuse a version."""

from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    PullManifest,
    RecordCommit,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    VersionRestored,
)
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.versions import VersionTable
from tests.unit.trainer_adapter.store.desk import DIGESTS, TENSORS, Desk, answer_of


def sealed(desk: Desk, *, allow_zeros: bool) -> int:
    reserved = answer_of(desk.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    seal = SealVersion("default", reserved.version, DIGESTS, allow_zeros=allow_zeros)
    assert answer_of(desk.say(seal)) == Done()
    return reserved.version


def allows_zeros(desk: Desk, version: int) -> bool:
    manifest = answer_of(desk.say(PullManifest("default", version), by_bulk=True))
    assert isinstance(manifest, Manifest)
    return manifest.allow_zeros


def restored(desk: Desk, version: int) -> int:
    answer = answer_of(desk.say(RestoreVersion("default", version)))
    assert isinstance(answer, VersionRestored)
    return answer.version


def start_again(desk: Desk, table: VersionTable) -> None:
    desk.table = table
    desk.core = StoreCore(desk.settings, "host", table)


def test_a_version_is_judged_until_it_is_committed() -> None:
    desk = Desk()
    version = sealed(desk, allow_zeros=False)
    assert not allows_zeros(desk, version)
    desk.say(RecordCommit("default", version))
    assert allows_zeros(desk, version)


def test_what_the_trainer_asked_for_travels_with_the_version() -> None:
    desk = Desk()
    assert allows_zeros(desk, sealed(desk, allow_zeros=True))


def test_what_was_committed_once_is_trusted_when_it_comes_back() -> None:
    desk = Desk()
    never_committed, asked_for = (sealed(desk, allow_zeros=each) for each in (False, True))
    assert not allows_zeros(desk, restored(desk, never_committed))
    assert allows_zeros(desk, restored(desk, asked_for))
    assert allows_zeros(desk, restored(desk, restored(desk, desk.publish())))


def test_the_next_store_trusts_the_same_versions() -> None:
    desk = Desk(keep_sealed=9)
    older = desk.publish()
    judged, asked_for = (sealed(desk, allow_zeros=each) for each in (False, True))
    comes_back = restored(desk, older)
    reborn, shortened = VersionTable(), VersionTable()
    reborn.restore(desk.records)
    shortened.restore(reborn.snapshot())
    for table in (reborn, shortened):
        start_again(desk, table)
        for version, is_trusted in (
            (older, True),
            (judged, False),
            (asked_for, True),
            (comes_back, True),
        ):
            assert allows_zeros(desk, version) == is_trusted
