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
from tests.unit.trainer_adapter.store.desk import (
    DIGESTS,
    PULLER,
    Desk,
    answer_of,
    code_of,
    released,
)


def restored(desk: Desk, version: int) -> int:
    answer = answer_of(desk.say(RestoreVersion("default", version)))
    assert isinstance(answer, VersionRestored)
    return answer.version


def test_old_content_comes_back_under_a_new_number_without_a_copy() -> None:
    desk = Desk()
    desk.publish(n=2)
    assert restored(desk, 1) == 3
    manifest = answer_of(desk.say(PullManifest("default", 3), by_bulk=True))
    assert isinstance(manifest, Manifest)
    assert (manifest.version, manifest.segment) == (3, "segment1")
    assert [each.digest for each in manifest.tensors] == DIGESTS
    assert desk.n_segments == 2


def test_a_restored_version_is_durable_before_it_is_answered() -> None:
    desk = Desk()
    desk.publish()
    effects = desk.say(RestoreVersion("default", 1))
    tensors = desk.table.by_key["default", 1].tensors
    sealed = Sealed("default", 2, "segment1", tensors, allow_zeros=True)
    assert effects[:2] == [Persist(Assigned("default", 2)), Persist(sealed)]
    again = VersionTable()
    again.restore(desk.records)  # type: ignore[arg-type]
    assert again.by_key["default", 2].segment == "segment1"


def test_a_restored_version_can_be_committed_and_pulled() -> None:
    desk = Desk()
    desk.publish(n=2)
    version = restored(desk, 1)
    desk.say(RecordCommit("default", version))
    assert desk.core.committed == {"default": 3}
    pull = desk.say(PullChunk("default", version, 0, 4), by_bulk=True)
    assert pull == [SendSegmentChunk(PULLER, "segment1", 0, 4)]


def test_a_shared_segment_is_given_back_with_its_last_version() -> None:
    desk = Desk(keep_committed=1)
    desk.publish()
    version = restored(desk, 1)
    assert released(desk.say(RecordCommit("default", version))) == []
    assert [each.number for each in desk.table.pullable()] == [2]
    gone = desk.say(RecordCommit("default", desk.seal()))
    assert [each for each in gone if isinstance(each, Release)] == [
        Release("segment1", is_reusable=True)
    ]


def test_what_is_no_longer_kept_cannot_be_restored() -> None:
    desk = Desk(keep_committed=1)
    desk.publish(n=2)
    for version in (0, 1, 7):
        assert code_of(desk.say(RestoreVersion("default", version))) == "version_unavailable"


def test_a_version_that_is_not_kept_is_told_with_those_that_are() -> None:
    desk = Desk()
    desk.publish(n=2)
    problem = answer_of(desk.say(RestoreVersion("default", 999)))
    assert isinstance(problem, Problem)
    assert problem.message == "version 999 of policy 'default' is not kept; kept are 1, 2"
