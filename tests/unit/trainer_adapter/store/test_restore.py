from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    PullChunk,
    PullManifest,
    RecordCommit,
    RestoreVersion,
    VersionRestored,
)
from rolloutbus.trainer_adapter.store.effects import Persist, Release, SendSegmentChunk
from rolloutbus.trainer_adapter.store.versions import Assigned, Sealed, VersionTable
from tests.unit.trainer_adapter.store.harness import (
    DIGESTS,
    PULLER,
    StoreCoreHarness,
    answer_of,
    code_of,
    released,
)


def restored(store: StoreCoreHarness, version: int) -> int:
    answer = answer_of(store.say(RestoreVersion("default", version)))
    assert isinstance(answer, VersionRestored)
    return answer.version


def test_old_content_comes_back_under_a_new_number_without_a_copy() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    assert restored(store, 1) == 3
    manifest = answer_of(store.say(PullManifest("default", 3), by_bulk=True))
    assert isinstance(manifest, Manifest)
    assert (manifest.version, manifest.segment) == (3, "segment1")
    assert [each.digest for each in manifest.tensors] == DIGESTS
    assert store.n_segments == 2


def test_its_number_is_above_those_that_another_store_gave() -> None:
    store = StoreCoreHarness()
    store.publish()
    answer = answer_of(store.say(RestoreVersion("default", 1, above=7)))
    assert answer == VersionRestored(8)
    again = VersionTable()
    again.restore(store.records)  # type: ignore[arg-type]
    assert again.assigned == {"default": 8}


def test_a_restored_version_is_durable_before_it_is_answered() -> None:
    store = StoreCoreHarness()
    store.publish()
    effects = store.say(RestoreVersion("default", 1))
    tensors = store.table.by_key["default", 1].tensors
    sealed = Sealed("default", 2, "segment1", tensors, allow_zeros=True)
    assert effects[:2] == [Persist(Assigned("default", 2)), Persist(sealed)]
    again = VersionTable()
    again.restore(store.records)  # type: ignore[arg-type]
    assert again.by_key["default", 2].segment == "segment1"


def test_a_restored_version_can_be_committed_and_pulled() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    version = restored(store, 1)
    store.say(RecordCommit("default", version))
    assert store.table.committed == {"default": 3}
    pull = store.say(PullChunk("default", version, 0, 4), by_bulk=True)
    assert pull == [SendSegmentChunk(PULLER, "segment1", 0, 4)]


def test_a_shared_segment_is_given_back_with_its_last_version() -> None:
    store = StoreCoreHarness(keep_committed=1)
    store.publish()
    version = restored(store, 1)
    assert released(store.say(RecordCommit("default", version))) == []
    assert [each.number for each in store.table.pullable()] == [2]
    gone = store.say(RecordCommit("default", store.seal()))
    assert [each for each in gone if isinstance(each, Release)] == [
        Release("segment1", is_reusable=True)
    ]


def test_what_is_no_longer_kept_cannot_be_restored() -> None:
    store = StoreCoreHarness(keep_committed=1)
    store.publish(n=2)
    for version in (0, 1, 7):
        assert code_of(store.say(RestoreVersion("default", version))) == "version_unavailable"


def test_a_version_that_is_not_kept_is_told_with_those_that_are() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    problem = answer_of(store.say(RestoreVersion("default", 999)))
    assert isinstance(problem, Problem)
    assert problem.message == "version 999 of policy 'default' is not kept; kept are 1, 2"
