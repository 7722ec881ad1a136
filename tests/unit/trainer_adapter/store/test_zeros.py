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
from tests.unit.trainer_adapter.store.harness import DIGESTS, TENSORS, StoreCoreHarness, answer_of


def sealed(store: StoreCoreHarness, *, allow_zeros: bool) -> int:
    reserved = answer_of(store.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    seal = SealVersion("default", reserved.version, DIGESTS, allow_zeros=allow_zeros)
    assert answer_of(store.say(seal)) == Done()
    return reserved.version


def allows_zeros(store: StoreCoreHarness, version: int) -> bool:
    manifest = answer_of(store.say(PullManifest("default", version), by_bulk=True))
    assert isinstance(manifest, Manifest)
    return manifest.allow_zeros


def restored(store: StoreCoreHarness, version: int) -> int:
    answer = answer_of(store.say(RestoreVersion("default", version)))
    assert isinstance(answer, VersionRestored)
    return answer.version


def start_again(store: StoreCoreHarness, table: VersionTable) -> None:
    store.table = table
    store.core = StoreCore(store.settings, "host", table)


def test_a_version_is_judged_until_it_is_committed() -> None:
    store = StoreCoreHarness()
    version = sealed(store, allow_zeros=False)
    assert not allows_zeros(store, version)
    store.say(RecordCommit("default", version))
    assert allows_zeros(store, version)


def test_what_the_trainer_asked_for_travels_with_the_version() -> None:
    store = StoreCoreHarness()
    assert allows_zeros(store, sealed(store, allow_zeros=True))


def test_what_was_committed_once_is_trusted_when_it_comes_back() -> None:
    store = StoreCoreHarness()
    never_committed, asked_for = (sealed(store, allow_zeros=each) for each in (False, True))
    assert not allows_zeros(store, restored(store, never_committed))
    assert allows_zeros(store, restored(store, asked_for))
    assert allows_zeros(store, restored(store, restored(store, store.publish())))


def test_the_next_store_trusts_the_same_versions() -> None:
    store = StoreCoreHarness(keep_sealed=9)
    older = store.publish()
    judged, asked_for = (sealed(store, allow_zeros=each) for each in (False, True))
    comes_back = restored(store, older)
    reborn, shortened = VersionTable(), VersionTable()
    reborn.restore(store.records)
    shortened.restore(reborn.snapshot())
    for table in (reborn, shortened):
        start_again(store, table)
        for version, is_trusted in (
            (older, True),
            (judged, False),
            (asked_for, True),
            (comes_back, True),
        ):
            assert allows_zeros(store, version) == is_trusted
