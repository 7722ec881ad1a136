import pytest

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    DeltaPart,
    PullChunk,
    PullDelta,
    RecordCommit,
    WeightDelta,
)
from rolloutbus.trainer_adapter.store.derived import IDLE_S, MAX_IN_THE_MAKING
from rolloutbus.trainer_adapter.store.effects import (
    ForgetDelta,
    MakeDelta,
    SendDeltaChunk,
    StoreAnswer,
    StoreEffect,
)
from rolloutbus.trainer_adapter.store.versions import BulkAsker
from tests.unit.trainer_adapter.store.harness import (
    PULLER,
    SIZE_BYTES,
    StoreCoreHarness,
    answer_of,
    code_of,
    released,
)

PARTS = [DeltaPart(0, "xor", 0, 8)]


def ask(store: StoreCoreHarness, version: int, base: int) -> list[StoreEffect]:
    return store.say(PullDelta("default", version, base), by_bulk=True)


def n_made(effects: list[StoreEffect]) -> int:
    return len([each for each in effects if isinstance(each, MakeDelta)])


def forgotten(effects: list[StoreEffect]) -> list[tuple[str, int, int]]:
    return [each.key for each in effects if isinstance(each, ForgetDelta)]


def test_a_delta_is_made_once_and_answered_to_all() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    first = ask(store, 2, 1)
    assert n_made(first) == 1
    assert answer_of(first) == WeightDelta("default", 2, 1, 8, PARTS)
    second = ask(store, 2, 1)
    assert (n_made(second), answer_of(second)) == (0, answer_of(first))


def test_who_asks_while_it_is_made_waits_for_the_same_one() -> None:
    store = StoreCoreHarness()
    store.holds_deltas = True
    store.publish(n=2)
    assert n_made(ask(store, 2, 1)) == 1
    other = BulkAsker(b"\x02" * 16, "9")  # type: ignore[arg-type]
    assert store.core.handle(other, PullDelta("default", 2, 1), store.now) == []
    answers = store.core.delta_made(("default", 2, 1), PARTS, 8, store.now)
    assert [each.asker for each in answers if isinstance(each, StoreAnswer)] == [PULLER, other]


def test_versions_that_are_being_compared_are_kept() -> None:
    store = StoreCoreHarness(keep_committed=1)
    store.holds_deltas = True
    store.publish()
    store.seal()
    ask(store, 2, 1)
    assert released(store.say(RecordCommit("default", 2))) == []
    store.core.delta_made(("default", 2, 1), PARTS, 8, store.now)
    assert released(store.core.tick(store.now)) == ["segment1"]


@pytest.mark.parametrize(("version", "base"), [(2, 7), (7, 1), (2, 2), (2, 0)])
def test_there_is_no_delta_without_both_versions(version: int, base: int) -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    assert code_of(ask(store, version, base)) == "version_unavailable"


def test_a_delta_that_would_be_no_smaller_is_refused_and_not_tried_again() -> None:
    store = StoreCoreHarness()
    store.holds_deltas = True
    store.publish(n=2)
    ask(store, 2, 1)
    assert code_of(store.core.delta_made(("default", 2, 1), None, 0, store.now)) == "no_delta"
    again = ask(store, 2, 1)
    assert (n_made(again), code_of(again)) == (0, "no_delta")


def test_chunks_that_name_a_base_come_from_the_delta() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    ask(store, 2, 1)
    effects = store.say(PullChunk("default", 2, 0, 8, 1), by_bulk=True)
    assert effects == [SendDeltaChunk(PULLER, ("default", 2, 1), 0, 8)]
    outside = answer_of(store.say(PullChunk("default", 2, 4, 8, 1), by_bulk=True))
    assert isinstance(outside, Problem)
    assert (outside.code, outside.field) == ("bad_request", "offset")
    unasked = store.say(PullChunk("default", 1, 0, 8, 2), by_bulk=True)
    assert code_of(unasked) == "version_unavailable"


def test_a_delta_that_nobody_asks_for_is_forgotten() -> None:
    store = StoreCoreHarness()
    store.publish(n=2)
    ask(store, 2, 1)
    store.now += IDLE_S
    store.say(PullChunk("default", 2, 0, 8, 1), by_bulk=True)
    store.now += IDLE_S
    assert forgotten(store.core.tick(store.now)) == []
    store.now += 1.0
    assert forgotten(store.core.tick(store.now)) == [("default", 2, 1)]


def test_deltas_to_a_version_go_with_it() -> None:
    store = StoreCoreHarness(keep_committed=1)
    store.publish()
    store.seal()
    ask(store, 2, 1)
    store.say(RecordCommit("default", 2))
    # The base may go first: who has it can still be brought to the newer one.
    assert answer_of(ask(store, 2, 1)) == WeightDelta("default", 2, 1, 8, PARTS)
    assert forgotten(store.say(RecordCommit("default", store.seal()))) == [("default", 2, 1)]


def test_deltas_have_together_no_more_bytes_than_one_version() -> None:
    store = StoreCoreHarness(keep_committed=9)
    store.holds_deltas = True
    store.publish(n=5)
    for base, n_bytes in ((1, 40), (2, 30)):
        ask(store, 5, base)
        store.now += 1.0
        assert (
            forgotten(store.core.delta_made(("default", 5, base), PARTS, n_bytes, store.now)) == []
        )
    store.now += 1.0
    ask(store, 5, 1)
    ask(store, 5, 3)
    made = store.core.delta_made(("default", 5, 3), PARTS, SIZE_BYTES - 40, store.now)
    assert forgotten(made) == [("default", 5, 2)]


def test_only_some_deltas_are_made_at_a_time_and_others_are_refused() -> None:
    store = StoreCoreHarness(keep_committed=9)
    store.holds_deltas = True
    store.publish(n=5)
    for base in range(1, MAX_IN_THE_MAKING + 1):
        ask(store, 5, base)
    assert code_of(ask(store, 5, 4)) == "busy"
    store.core.delta_made(("default", 5, 1), PARTS, 8, store.now)
    assert n_made(ask(store, 5, 4)) == 1
