"""What may be published is judged against the version before."""

import pytest

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.trainer_adapter.publisher.weight_writer import Judgement, Soundness

LAYOUT = lay_out([("a", "F32", (2,)), ("b", "F32", (2,))])
FINE = Judgement(1, is_finite=True, is_zero=False)
ZERO = Judgement(2, is_finite=True, is_zero=True)
BROKEN = Judgement(3, is_finite=False, is_zero=False)


def test_what_is_not_finite_is_named() -> None:
    with pytest.raises(Refused) as caught:
        Soundness().require(LAYOUT, [FINE, BROKEN])
    assert (caught.value.field, caught.value.outcome) == ("tensors.b", "not_started")


def test_zeros_may_come_first_but_not_after_values() -> None:
    soundness = Soundness()
    soundness.require(LAYOUT, [FINE, ZERO])
    soundness.committed(LAYOUT, [FINE, ZERO])
    soundness.require(LAYOUT, [FINE, ZERO])
    with pytest.raises(Refused) as caught:
        soundness.require(LAYOUT, [ZERO, ZERO])
    assert caught.value.field == "tensors.a"


def test_zeros_may_come_after_a_version_with_the_wrong_dtype() -> None:
    soundness = Soundness()
    integers = lay_out([("a", "I64", (2,)), ("b", "BOOL", (2,)), ("c", "U8", (2,))])
    soundness.committed(integers, [FINE, FINE, FINE])  # whether integers are zero is not looked at
    soundness.require(LAYOUT, [ZERO, ZERO])


def test_zeros_that_are_meant_are_published_and_infinity_is_not() -> None:
    soundness = Soundness()
    soundness.committed(LAYOUT, [FINE, FINE])
    with pytest.raises(Refused, match="allow_zeros=True"):
        soundness.require(LAYOUT, [ZERO, FINE])
    soundness.require(LAYOUT, [ZERO, FINE], allow_zeros=True)
    with pytest.raises(Refused, match="infinity"):
        soundness.require(LAYOUT, [ZERO, BROKEN], allow_zeros=True)


def test_what_follows_a_restored_version_is_not_compared_with_another() -> None:
    soundness = Soundness()
    soundness.committed(LAYOUT, [FINE, FINE])
    soundness.restored()
    soundness.require(LAYOUT, [ZERO, FINE])


def test_a_version_that_was_refused_is_not_what_the_next_is_compared_with() -> None:
    soundness = Soundness()
    soundness.committed(LAYOUT, [FINE, FINE])
    for _ in range(2):
        with pytest.raises(Refused):
            soundness.require(LAYOUT, [ZERO, FINE])


def test_nothing_is_checked_when_it_is_off() -> None:
    soundness = Soundness("off")
    soundness.committed(LAYOUT, [FINE, FINE])
    soundness.require(LAYOUT, [ZERO, BROKEN])
