"""What is not committed when it is settled never will be, and its memory is given back."""

from rolloutbus.bus.wire.messages.weights import (
    RecordCommit,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    Settled,
    SettleVersion,
)
from rolloutbus.trainer_adapter.store.effects import Persist, StoreAnswer
from rolloutbus.trainer_adapter.store.versions import HISTORY, Retired, VersionTable
from tests.unit.trainer_adapter.store.harness import (
    CLIENT,
    DIGESTS,
    TENSORS,
    StoreCoreHarness,
    answer_of,
    code_of,
    released,
)

KEPT = 6
"""More than the store keeps the bytes of."""


def settle(version: int) -> SettleVersion:
    return SettleVersion("default", version)


def test_a_reservation_is_given_back_at_once() -> None:
    store = StoreCoreHarness()
    reserved = answer_of(store.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    effects = store.say(settle(reserved.version))
    assert released(effects) == [reserved.segment]
    assert answer_of(effects) == Settled(is_committed=False)
    assert code_of(store.say(SealVersion("default", reserved.version, DIGESTS))) == (
        "version_unavailable"
    )


def test_a_sealed_version_that_is_settled_can_never_be_committed() -> None:
    store = StoreCoreHarness()
    version = store.seal()
    effects = store.say(settle(version))
    kinds = [type(each) for each in effects]
    assert kinds.index(Persist) < kinds.index(StoreAnswer)
    assert Persist(Retired("default", version)) in effects
    assert released(effects) == ["segment1"]
    assert code_of(store.say(RecordCommit("default", version))) == "version_unavailable"
    again = VersionTable()
    again.restore(store.records)
    assert again.committed == {}
    assert answer_of(store.say(settle(version))) == Settled(is_committed=False)


def test_a_committed_version_stays_and_that_is_said_after_it_is_written() -> None:
    store = StoreCoreHarness()
    version = store.publish()
    effects = store.say(settle(version))
    assert [type(each) for each in effects] == [Persist, StoreAnswer]
    assert answer_of(effects) == Settled(is_committed=True)
    assert released(effects) == []


def test_a_commit_is_remembered_when_its_bytes_are_gone_and_the_store_starts_again() -> None:
    store = StoreCoreHarness(keep_committed=1)
    first, failed = store.publish(), store.seal()
    store.say(settle(failed))
    store.publish(n=4)
    assert (("default", first) in store.table.by_key) is False
    restarted = StoreCoreHarness(keep_committed=1)
    restarted.table.restore(store.records)
    restarted.table.restore(VersionTable().snapshot())
    for each in (store, restarted):
        assert answer_of(each.say(settle(first))) == Settled(is_committed=True)
        assert answer_of(each.say(settle(failed))) == Settled(is_committed=False)
    shortened = StoreCoreHarness(keep_committed=1)
    shortened.table.restore(store.table.snapshot())
    assert answer_of(shortened.say(settle(first))) == Settled(is_committed=True)
    assert shortened.table.committed == store.table.committed


def test_a_full_history_forgets_the_oldest_though_the_store_has_started_again() -> None:
    store = StoreCoreHarness()
    store.publish(n=HISTORY)
    restarted = StoreCoreHarness()
    restarted.table.restore(store.table.snapshot())
    restarted.publish(n=KEPT)
    for version in (KEPT + 1, HISTORY - 1, HISTORY, HISTORY + KEPT):
        assert answer_of(restarted.say(settle(version))) == Settled(is_committed=True)
    assert code_of(restarted.say(settle(KEPT))) == "version_unavailable"


def test_what_never_was_cannot_be_settled() -> None:
    store = StoreCoreHarness()
    assert code_of(store.say(settle(1))) == "version_unavailable"


def test_a_version_that_is_being_verified_is_settled_afterwards() -> None:
    store = StoreCoreHarness()
    reserved = answer_of(store.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    store.core.handle(CLIENT, SealVersion("default", 1, DIGESTS), store.now)
    assert store.core.handle(CLIENT, settle(1), store.now) == []
    effects = store.settle(store.core.verified(("default", 1), "", store.now))
    assert StoreAnswer(CLIENT, "finished", Settled(is_committed=False)) in effects
    assert released(effects) == [reserved.segment]


def test_bytes_that_are_being_written_to_files_stay_until_then() -> None:
    store = StoreCoreHarness(disk="/somewhere")
    store.holds_files = True
    version = store.seal()
    assert released(store.say(settle(version))) == []
    assert code_of(store.say(RecordCommit("default", version))) == "version_unavailable"
    assert code_of(store.say(SealVersion("default", version, DIGESTS))) == "version_unavailable"
    store.settle(store.core.files_written("default/1"))
    assert released(store.settle(store.core.tick(store.now))) == ["segment1"]


def test_a_restored_version_that_is_settled_leaves_the_bytes_it_shares() -> None:
    store = StoreCoreHarness()
    version = store.publish()
    store.say(RestoreVersion("default", version))
    assert released(store.say(settle(version + 1))) == []
    assert store.table.by_key[("default", version)].is_pullable


def test_a_full_store_says_what_is_being_written() -> None:
    store = StoreCoreHarness()
    store.say(ReserveVersion("default", TENSORS))
    effects = store.core.handle(CLIENT, ReserveVersion("default", TENSORS), store.now)
    effects += store.core.allocation_failed(("default", 2), "no room")
    [answer] = [each for each in effects if isinstance(each, StoreAnswer)]
    assert "being written now" in str(answer.body)
