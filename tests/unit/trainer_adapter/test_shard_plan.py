"""Every rank draws the same plan of who gives what to rank 0."""

import pytest
import torch

from rolloutbus.bus.wire.codec import runs_within
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.publisher.sharded import Holding, plan_of, size_of


def held(name: str, *shape: int, leads: bool = True) -> Holding:
    return Holding(name, "F32", shape, leads)


def test_a_name_that_all_ranks_have_is_taken_from_the_first() -> None:
    [plan] = plan_of([[held("w", 4)], [held("w", 4)]], None)
    assert (plan.owners, plan.whole.shape) == ((0,), (4,))


def test_names_of_other_ranks_follow_those_of_the_first() -> None:
    plan = plan_of([[held("a", 1), held("b", 1)], [held("c", 1), held("a", 1)]], None)
    assert [(each.name, each.owners) for each in plan] == [("a", (0,)), ("b", (0,)), ("c", (1,))]


def test_a_tensor_that_ranks_gather_together_comes_from_the_first_of_them() -> None:
    ranks = [[held("x", 1)], [held("w", 8)], [held("w", 8, leads=False)]]
    plan = plan_of(ranks, None)
    assert [(each.name, each.owners) for each in plan] == [("x", (0,)), ("w", (1,))]


def test_parts_are_merged_in_the_order_of_ranks() -> None:
    ranks = [[held("w", 4, 2)], [held("w", 4, 3)]]
    [plan] = plan_of(ranks, lambda _, parts: torch.cat(list(parts), dim=1))
    assert plan.owners == (0, 1)
    assert [part.shape for part in plan.parts] == [(4, 2), (4, 3)]
    assert (plan.whole.shape, plan.whole.dtype) == ((4, 5), torch.float32)


def test_ranks_that_hold_nothing_have_nothing_to_publish() -> None:
    with pytest.raises(SettingsError):
        plan_of([[], []], None)


def test_buckets_are_full_and_in_order_and_a_large_tensor_has_its_own() -> None:
    sizes = [1, 1, 9, 1, 2, 1, 1]
    plan = plan_of([[held(str(i), n) for i, n in enumerate(sizes)]], None)
    buckets = runs_within(16, plan, lambda each: size_of(each.whole))
    assert [[each.whole.shape[0] for each in bucket] for bucket in buckets] == [
        [1, 1],
        [9],
        [1, 2, 1],
        [1],
    ]
