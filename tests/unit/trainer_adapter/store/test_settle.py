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
from rolloutbus.trainer_adapter.store.versions import Retired, VersionTable
from tests.unit.trainer_adapter.store.desk import (
    CLIENT,
    DIGESTS,
    TENSORS,
    Desk,
    answer_of,
    code_of,
    released,
)


def settle(version: int) -> SettleVersion:
    return SettleVersion("default", version)


def test_a_reservation_is_given_back_at_once() -> None:
    desk = Desk()
    reserved = answer_of(desk.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    effects = desk.say(settle(reserved.version))
    assert released(effects) == [reserved.segment]
    assert answer_of(effects) == Settled(is_committed=False)
    assert code_of(desk.say(SealVersion("default", reserved.version, DIGESTS))) == (
        "version_unavailable"
    )


def test_a_sealed_version_that_is_settled_can_never_be_committed() -> None:
    desk = Desk()
    version = desk.seal()
    effects = desk.say(settle(version))
    kinds = [type(each) for each in effects]
    assert kinds.index(Persist) < kinds.index(StoreAnswer)
    assert Persist(Retired("default", version)) in effects
    assert released(effects) == ["segment1"]
    assert code_of(desk.say(RecordCommit("default", version))) == "version_unavailable"
    again = VersionTable()
    again.restore(desk.records)
    assert again.committed == {}
    assert answer_of(desk.say(settle(version))) == Settled(is_committed=False)


def test_a_committed_version_stays_and_that_is_said_after_it_is_written() -> None:
    desk = Desk()
    version = desk.publish()
    effects = desk.say(settle(version))
    assert [type(each) for each in effects] == [Persist, StoreAnswer]
    assert answer_of(effects) == Settled(is_committed=True)
    assert released(effects) == []


def test_a_commit_is_remembered_when_its_bytes_are_gone_and_the_store_starts_again() -> None:
    desk = Desk(keep_committed=1)
    first, failed = desk.publish(), desk.seal()
    desk.say(settle(failed))
    desk.publish(n=4)
    assert (("default", first) in desk.table.by_key) is False
    restarted = Desk(keep_committed=1)
    restarted.table.restore(desk.records)
    restarted.table.restore(VersionTable().snapshot())
    for each in (desk, restarted):
        assert answer_of(each.say(settle(first))) == Settled(is_committed=True)
        assert answer_of(each.say(settle(failed))) == Settled(is_committed=False)
    shortened = Desk(keep_committed=1)
    shortened.table.restore(desk.table.snapshot())
    assert answer_of(shortened.say(settle(first))) == Settled(is_committed=True)
    assert shortened.table.committed == desk.table.committed


def test_what_never_was_cannot_be_settled() -> None:
    desk = Desk()
    assert code_of(desk.say(settle(1))) == "version_unavailable"


def test_a_version_that_is_being_verified_is_settled_afterwards() -> None:
    desk = Desk()
    reserved = answer_of(desk.say(ReserveVersion("default", TENSORS)))
    assert isinstance(reserved, Reserved)
    desk.core.handle(CLIENT, SealVersion("default", 1, DIGESTS), desk.now)
    assert desk.core.handle(CLIENT, settle(1), desk.now) == []
    effects = desk.settle(desk.core.verified(("default", 1), "", desk.now))
    assert StoreAnswer(CLIENT, "finished", Settled(is_committed=False)) in effects
    assert released(effects) == [reserved.segment]


def test_bytes_that_are_being_written_to_files_stay_until_then() -> None:
    desk = Desk(disk="/somewhere")
    desk.holds_files = True
    version = desk.seal()
    assert released(desk.say(settle(version))) == []
    assert code_of(desk.say(RecordCommit("default", version))) == "version_unavailable"
    desk.settle(desk.core.files_written("default/1"))
    assert released(desk.settle(desk.core.tick(desk.now))) == ["segment1"]


def test_a_restored_version_that_is_settled_leaves_the_bytes_it_shares() -> None:
    desk = Desk()
    version = desk.publish()
    desk.say(RestoreVersion("default", version))
    assert released(desk.say(settle(version + 1))) == []
    assert desk.table.by_key[("default", version)].is_pullable


def test_a_full_store_says_what_is_being_written() -> None:
    desk = Desk()
    desk.say(ReserveVersion("default", TENSORS))
    effects = desk.core.handle(CLIENT, ReserveVersion("default", TENSORS), desk.now)
    effects += desk.core.allocation_failed(("default", 2), "no room")
    [answer] = [each for each in effects if isinstance(each, StoreAnswer)]
    assert "being written now" in str(answer.body)
