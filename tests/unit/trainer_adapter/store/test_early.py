"""Tensors of a version that the store verifies while others are still written."""

import pytest

from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    PushChunk,
    ReserveVersion,
    SealVersion,
    Settled,
    SettleVersion,
    VerifyTensors,
)
from rolloutbus.trainer_adapter.store.effects import StoreAnswer, StoreEffect, Verify, VerifyEarly
from tests.unit.trainer_adapter.store.harness import (
    DIGESTS,
    TENSORS,
    StoreCoreHarness,
    answer_of,
    code_of,
)


@pytest.fixture
def store() -> StoreCoreHarness:
    """Version 1 is being written."""
    harness = StoreCoreHarness()
    harness.say(ReserveVersion("default", TENSORS))
    return harness


def early_of(effects: list[StoreEffect]) -> VerifyEarly:
    (early,) = [each for each in effects if isinstance(each, VerifyEarly)]
    return early


def verified_by_the_seal(effects: list[StoreEffect]) -> list[str]:
    """Names of the tensors that the seal has verified."""
    (verify,) = [each for each in effects if isinstance(each, Verify)]
    return [each.name for each in verify.tensors]


def test_what_was_found_right_early_is_not_read_again_by_the_seal(store: StoreCoreHarness) -> None:
    effects = store.say(VerifyTensors("default", 1, [1], [DIGESTS[1]]))
    assert answer_of(effects) == Done()  # nobody waits for what is found out
    early = early_of(effects)
    assert [(n, each.name, each.digest) for n, each in early.tensors.items()] == [(1, "b", 22)]
    assert not store.core.verified_early(early.key, early.tensors, is_right=True)

    effects = store.say(SealVersion("default", 1, DIGESTS))

    assert verified_by_the_seal(effects) == ["a"]
    assert answer_of(effects) == Done()


def test_a_seal_waits_for_what_is_being_read_and_not_for_what_is_not_begun(
    store: StoreCoreHarness,
) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0], DIGESTS[:1])))
    effects = store.say(VerifyTensors("default", 1, [1], DIGESTS[1:]))
    assert [type(each) for each in effects] == [StoreAnswer]  # one read at a time
    assert not store.say(SealVersion("default", 1, DIGESTS))

    ended = store.core.verified_early(early.key, early.tensors, is_right=True)
    effects = store.settle(ended)

    assert verified_by_the_seal(effects) == ["b"]
    assert answer_of(effects) == Done()


def test_what_is_told_of_meanwhile_is_read_next(store: StoreCoreHarness) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0], DIGESTS[:1])))
    store.say(VerifyTensors("default", 1, [1], DIGESTS[1:]))
    following = early_of(store.core.verified_early(early.key, early.tensors, is_right=False))
    assert following.tensors.keys() == {1}
    assert not store.core.verified_early(following.key, following.tensors, is_right=True)
    # The first one had perhaps not been written yet.
    assert verified_by_the_seal(store.say(SealVersion("default", 1, DIGESTS))) == ["a"]


def test_a_seal_with_other_digests_reads_again(store: StoreCoreHarness) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0, 1], [11, 99])))
    store.core.verified_early(early.key, early.tensors, is_right=True)
    assert verified_by_the_seal(store.say(SealVersion("default", 1, DIGESTS))) == ["b"]


def test_after_wrong_bytes_all_is_read_again(store: StoreCoreHarness) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0], [11])))
    store.core.verified_early(early.key, early.tensors, is_right=True)
    store.mismatch = "b"
    assert code_of(store.say(SealVersion("default", 1, DIGESTS))) == "digest_mismatch"
    store.mismatch = ""
    assert verified_by_the_seal(store.say(SealVersion("default", 1, DIGESTS))) == ["a", "b"]


@pytest.mark.parametrize("is_found", [True, False], ids=["found right before", "under way"])
def test_bytes_that_are_pushed_later_are_all_read_by_the_seal(
    store: StoreCoreHarness, *, is_found: bool
) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0], [11])))
    if is_found:
        store.core.verified_early(early.key, early.tensors, is_right=True)
    else:
        store.say(VerifyTensors("default", 1, [1], [22]))
    store.say(PushChunk("default", 1, 0, b"\x00" * 64), by_bulk=True)
    if not is_found:
        assert not store.core.verified_early(early.key, early.tensors, is_right=True)
    effects = store.say(VerifyTensors("default", 1, [1], [22]))
    assert [type(each) for each in effects] == [StoreAnswer]
    assert verified_by_the_seal(store.say(SealVersion("default", 1, DIGESTS))) == ["a", "b"]


def test_a_version_may_be_given_up_while_some_of_it_is_verified(store: StoreCoreHarness) -> None:
    early = early_of(store.say(VerifyTensors("default", 1, [0], [11])))
    assert answer_of(store.say(SettleVersion("default", 1))) == Settled(is_committed=False)
    assert not store.core.verified_early(early.key, early.tensors, is_right=True)
    assert store.seal() == 2


@pytest.mark.parametrize(
    ("numbers", "digests", "field"), [([2], [1], "numbers"), ([0], [], "digests")]
)
def test_what_cannot_be_verified_is_refused(
    store: StoreCoreHarness, numbers: list[int], digests: list[int], field: str
) -> None:
    problem = answer_of(store.say(VerifyTensors("default", 1, numbers, digests)))
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("bad_request", field)


def test_nothing_is_verified_early_of_a_version_that_is_not_being_written() -> None:
    store = StoreCoreHarness()
    sealed = store.seal()
    for version in (sealed, sealed + 1):
        ask = VerifyTensors("default", version, [0], [11])
        assert code_of(store.say(ask)) == "version_unavailable"


def test_a_version_that_the_store_is_reminded_of_is_not_given_up() -> None:
    store = StoreCoreHarness(reservation_s=60.0)
    store.say(ReserveVersion("default", TENSORS))
    for _ in range(5):
        store.now += 50.0
        assert store.core.tick(store.now) == []
        assert answer_of(store.say(VerifyTensors("default", 1, [], []))) == Done()
    assert answer_of(store.say(SealVersion("default", 1, DIGESTS))) == Done()
