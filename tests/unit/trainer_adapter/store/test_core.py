import pytest

from rolloutbus.bus.wire.errors import LocalProtocolError
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    Offer,
    PullChunk,
    PullManifest,
    PushChunk,
    RecordCommit,
    Reserved,
    ReserveVersion,
    SealVersion,
    Tensor,
)
from rolloutbus.bus.wire.versions import MAX_VERSION
from rolloutbus.trainer_adapter.store.effects import (
    Allocate,
    Freeze,
    MakeAhead,
    Persist,
    Release,
    SendSegmentChunk,
    StoreAnswer,
    Verify,
    WriteChunk,
)
from rolloutbus.trainer_adapter.store.versions import (
    VERSION_LIFE,
    Assigned,
    CommitRecord,
    Retired,
    Sealed,
    StoredVersion,
    VersionTable,
)
from tests.unit.trainer_adapter.store.harness import (
    CLIENT,
    DIGESTS,
    PULLER,
    SIZE_BYTES,
    TENSORS,
    StoreCoreHarness,
    answer_of,
    code_of,
    released,
)


def test_version_numbers_are_written_down_before_anyone_sees_them() -> None:
    effects = StoreCoreHarness().say(ReserveVersion("default", TENSORS))
    assert [type(each) for each in effects] == [Persist, Allocate, StoreAnswer]
    assert effects[0] == Persist(Assigned("default", 1))
    assert answer_of(effects) == Reserved(1, "host", "segment1", SIZE_BYTES)


def test_version_numbers_grow_per_policy() -> None:
    store = StoreCoreHarness()
    assert [store.seal("a"), store.seal("b"), store.seal("a")] == [1, 1, 2]


def test_a_trainer_may_choose_a_number_above_all_before() -> None:
    store = StoreCoreHarness()
    store.seal("a")

    chosen = answer_of(store.say(ReserveVersion("a", TENSORS, 40)))

    assert isinstance(chosen, Reserved)
    assert chosen.version == 40
    assert store.seal("a") == 41
    for taken in (7, 40):  # passed over; given
        assert code_of(store.say(ReserveVersion("a", TENSORS, taken))) == "stale_version"


def test_a_version_is_durable_and_readable_before_its_seal_is_answered() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    effects = store.say(SealVersion("default", 1, DIGESTS))
    assert [type(each) for each in effects] == [Verify, Persist, Freeze, StoreAnswer]
    (sealed,) = [each for each in store.records if isinstance(each, Sealed)]
    assert [each.digest for each in sealed.tensors] == DIGESTS


def test_sealing_twice_answers_twice_and_verifies_once() -> None:
    store = StoreCoreHarness()
    version = store.seal()
    effects = store.say(SealVersion("default", version, DIGESTS))
    assert isinstance(answer_of(effects), Done)
    assert not any(isinstance(each, Verify) for each in effects)
    assert code_of(store.say(SealVersion("default", version, [1, 2]))) == "digest_mismatch"


def test_wrong_bytes_leave_the_version_reserved_so_that_it_can_be_written_again() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    store.mismatch = "b"
    problem = answer_of(store.say(SealVersion("default", 1, DIGESTS)))
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("digest_mismatch", "tensors.b")
    store.mismatch = ""
    assert answer_of(store.say(SealVersion("default", 1, DIGESTS))) == Done()


def test_no_room_fails_the_reservation_and_keeps_its_number_taken() -> None:
    store = StoreCoreHarness()
    asked = store.core.handle(CLIENT, ReserveVersion("default", TENSORS), store.now)
    key = next(each.key for each in asked if isinstance(each, Allocate))
    assert code_of(store.core.allocation_failed(key, "full")) == "store_full"
    assert store.seal() == 2


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([], "tensors"),
        ([Tensor("a", "F32", (2,), 0, 9)], "tensors.a"),
        ([Tensor("a", "F31", (2,), 0, 8)], "tensors.a"),
        ([Tensor("a", "F32", (-2,), 0, -8)], "tensors.a"),
        ([Tensor("", "F32", (2,), 0, 8)], "tensors."),
        ([Tensor("a", "F32", (2,), 0, 8), Tensor("b", "F32", (2,), 4, 8)], "tensors.b"),
        ([Tensor("a", "F32", (2,), 0, 8), Tensor("a", "F32", (2,), 8, 8)], "tensors.a"),
    ],
)
def test_impossible_layouts_are_refused_naming_the_tensor(
    tensors: list[Tensor], field: str
) -> None:
    problem = answer_of(StoreCoreHarness().say(ReserveVersion("default", tensors)))
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field, problem.outcome) == ("bad_request", field, "not_started")


def test_commits_are_idempotent_and_never_go_back() -> None:
    store = StoreCoreHarness()
    first, second = store.publish(), store.publish()
    assert answer_of(store.say(RecordCommit("default", second))) == Done()
    assert code_of(store.say(RecordCommit("default", first))) == "stale_version"
    assert store.table.committed == {"default": second}
    assert [each for each in store.records if isinstance(each, CommitRecord)] == [
        CommitRecord("default", first),
        CommitRecord("default", second),
    ]


def test_waves_are_remembered_until_they_are_through() -> None:
    store = StoreCoreHarness()
    first = store.publish()
    second = store.seal()
    for floor in (3, 3):  # a new router may ask again
        assert answer_of(store.say(RecordCommit("default", second, floor))) == Done()
    assert (store.table.committed, store.table.waves) == ({"default": 2}, {"default": (first, 3)})
    reborn = VersionTable()
    reborn.restore(store.records)
    assert reborn.waves == {"default": (first, 3)}
    shortened = VersionTable()
    shortened.restore(reborn.snapshot())
    assert shortened.waves == reborn.waves
    for _ in range(2):
        assert answer_of(store.say(RecordCommit("default", second))) == Done()
    assert store.table.waves == {}
    assert answer_of(store.say(RecordCommit("default", second, 3))) == Done()
    assert store.table.waves == {}
    reborn.restore(store.records[-1:])
    assert (reborn.committed, reborn.waves) == ({"default": second}, {})


def test_adapters_that_workers_are_to_have_are_remembered_until_they_are_unloaded() -> None:
    store = StoreCoreHarness()
    version, other = store.seal("default.judge"), store.seal("default.other")
    for name, number in (("judge", version), ("judge", version), ("other", other), ("other", 0)):
        body = RecordCommit(f"default.{name}", number, is_adapter=True)
        assert answer_of(store.say(body)) == Done()
    missing = RecordCommit("default.judge", 9, is_adapter=True)
    assert code_of(store.say(missing)) == "version_unavailable"
    assert (store.table.committed, store.table.adapters) == ({}, {"default.judge": version})
    reborn, shortened = VersionTable(), VersionTable()
    reborn.restore(store.records)
    shortened.restore(reborn.snapshot())
    for table in (reborn, shortened):
        assert (table.committed, table.adapters) == ({}, {"default.judge": version})


def test_only_sealed_versions_can_be_committed_or_pulled() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    assert code_of(store.say(RecordCommit("default", 1))) == "version_unavailable"
    assert code_of(store.say(PullManifest("default", 1), by_bulk=True)) == "version_unavailable"
    store.say(SealVersion("default", 1, DIGESTS))
    manifest = answer_of(store.say(PullManifest("default", 1), by_bulk=True))
    assert isinstance(manifest, Manifest)
    assert (manifest.segment, manifest.size_bytes) == ("segment1", SIZE_BYTES)


def test_the_last_three_committed_versions_are_kept() -> None:
    store = StoreCoreHarness()
    for _ in range(5):
        store.publish()
    assert [each.number for each in store.table.pullable()] == [3, 4, 5]
    assert [each for each in store.records if isinstance(each, Retired)] == [
        Retired("default", 1),
        Retired("default", 2),
    ]


def test_a_segment_is_made_ahead_once_old_ones_have_been_given_back() -> None:
    store = StoreCoreHarness(keep_committed=1)
    store.publish()
    commit = RecordCommit("default", store.seal())
    effects = store.say(commit)
    assert [type(each) for each in effects][-2:] == [Release, MakeAhead]
    assert effects[-1] == MakeAhead(SIZE_BYTES)
    assert not any(isinstance(each, MakeAhead) for each in store.say(commit))


def test_no_segment_is_made_ahead_for_adapters() -> None:
    store = StoreCoreHarness()
    commit = RecordCommit("default.judge", store.seal("default.judge"), is_adapter=True)
    assert not any(isinstance(each, MakeAhead) for each in store.say(commit))


def test_a_version_that_is_being_pulled_is_kept_until_its_puller_is_silent() -> None:
    store = StoreCoreHarness(keep_committed=1, pull_grace_s=15.0)
    version = store.publish()
    store.say(PullChunk("default", version, 0, 16), by_bulk=True)
    assert released(store.say(RecordCommit("default", store.seal()))) == []
    store.now += 14.0
    assert released(store.core.tick(store.now)) == []
    store.now += 2.0
    assert released(store.core.tick(store.now)) == ["segment1"]


def test_sealed_versions_that_are_never_committed_do_not_pile_up() -> None:
    store = StoreCoreHarness()
    for _ in range(6):
        store.seal()
    assert [each.number for each in store.table.pullable()] == [5, 6]


def test_a_reservation_that_nobody_uses_lapses_and_its_segment_is_not_reused() -> None:
    store = StoreCoreHarness(reservation_s=60.0)
    store.say(ReserveVersion("default", TENSORS))
    store.now += 59.0
    store.say(PushChunk("default", 1, 0, b"x" * 16), by_bulk=True)
    store.now += 59.0
    assert store.core.tick(store.now) == []
    store.now += 2.0
    assert store.core.tick(store.now) == [Release("segment1", is_reusable=False)]
    assert code_of(store.say(SealVersion("default", 1, DIGESTS))) == "version_unavailable"


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(-1, 4), (0, 0), (0, -4), (0, SIZE_BYTES + 1), (SIZE_BYTES, 1), (0, CHUNK_BYTES + 1)],
)
def test_ranges_outside_of_the_version_are_not_read(offset: int, size_bytes: int) -> None:
    store = StoreCoreHarness()
    version = store.seal()
    effects = store.say(PullChunk("default", version, offset, size_bytes), by_bulk=True)
    assert code_of(effects) == "bad_request"


def test_chunks_are_written_only_while_the_version_is_reserved() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    push = PushChunk("default", 1, SIZE_BYTES - 4, b"abcd")
    assert store.say(push, by_bulk=True) == [WriteChunk(PULLER, "segment1", 76, b"abcd")]
    too_long = PushChunk("default", 1, SIZE_BYTES - 4, b"abcde")
    assert code_of(store.say(too_long, by_bulk=True)) == "bad_request"
    store.say(SealVersion("default", 1, DIGESTS))
    assert code_of(store.say(push, by_bulk=True)) == "version_unavailable"
    pull = PullChunk("default", 1, 0, 4)
    assert store.say(pull, by_bulk=True) == [SendSegmentChunk(PULLER, "segment1", 0, 4)]


def test_a_restored_table_is_the_one_that_was_written_down() -> None:
    store = StoreCoreHarness()
    for _ in range(5):
        store.publish()
    store.seal()
    store.say(ReserveVersion("default", TENSORS))
    for records in (store.records, store.table.snapshot()):
        again = VersionTable()
        again.restore(records)  # type: ignore[arg-type]
        assert again.assigned == {"default": 7}
        assert again.committed == {"default": 5}
        assert [(each.number, each.state) for each in again.pullable()] == [
            (3, "committed"),
            (4, "committed"),
            (5, "committed"),
            (6, "sealed"),
        ]


def test_a_step_that_is_not_in_the_table_raises_and_changes_nothing() -> None:
    stored = StoredVersion("default", 1, TENSORS)
    with pytest.raises(LocalProtocolError):
        stored.on("commit")
    assert stored.state == "reserving"
    states = set(VERSION_LIFE)
    assert {after for row in VERSION_LIFE.values() for after in row.values()} <= states


def test_a_manifest_says_what_was_offered_with_the_seal() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    offer = Offer("cuda_ipc", "GPU-1", "host")
    store.say(SealVersion("default", 1, DIGESTS, [offer]))
    manifest = answer_of(store.say(PullManifest("default", 1), by_bulk=True))
    assert isinstance(manifest, Manifest)
    assert manifest.offers == [offer]


def test_numbers_go_on_above_those_that_another_store_gave() -> None:
    store = StoreCoreHarness()
    assert code_of(store.say(ReserveVersion("default", TENSORS, 7, above=7))) == "stale_version"
    reserved = answer_of(store.say(ReserveVersion("default", TENSORS, above=7)))
    assert isinstance(reserved, Reserved)
    assert reserved.version == 8
    again = VersionTable()
    again.restore(store.records)
    assert again.assigned == {"default": 8}


def test_no_version_follows_the_largest_number() -> None:
    store = StoreCoreHarness()
    last = answer_of(store.say(ReserveVersion("default", TENSORS, MAX_VERSION)))
    assert isinstance(last, Reserved)
    assert last.version == MAX_VERSION
    assert code_of(store.say(ReserveVersion("default", TENSORS))) == "bad_request"
    assert code_of(store.say(ReserveVersion("default", TENSORS, MAX_VERSION))) == "stale_version"
