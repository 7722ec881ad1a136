"""Which broadcasts bring a bucket, and what a version still lacks."""

import pytest
import torch

from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.trainer_adapter.joined_group.orders import Piece
from rolloutbus.trainer_adapter.joined_group.tensor_set import BucketPlan, TensorSet, plan_of

FLAG = TensorForm("flag", "U8", (3,))
NORM = TensorForm("norm", "F32", (2,))
HEAD = TensorForm("head", "BF16", (2, 4))
SCALE = TensorForm("scale", "F32", ())
FORMS = [FLAG, NORM, HEAD, SCALE]


def ends(plan: BucketPlan) -> list[int]:
    """Where each packed broadcast ends."""
    return [piece.start + piece.n_elements for piece in plan.order.pieces]


def test_each_tensor_comes_alone_as_what_it_is() -> None:
    plan = plan_of(FORMS, None)
    assert plan.order.pieces == [
        Piece("uint8", 0, 3),
        Piece("float32", 64, 2),
        Piece("bfloat16", 128, 8),
        Piece("float32", 192, 1),
    ]
    assert plan.order.size_bytes >= 196


@pytest.mark.parametrize(
    ("packed_bytes", "wanted"),
    [(0, [31]), (1 << 30, [31]), (11, [27, 31]), (10, [11, 27, 31]), (1, [3, 11, 27, 31])],
)
def test_packed_broadcasts_end_with_the_tensor_that_makes_them_larger(
    packed_bytes: int, wanted: list[int]
) -> None:
    assert ends(plan_of(FORMS, packed_bytes)) == wanted


def test_tensors_packed_behind_one_another_are_what_was_sent() -> None:
    sent = {
        "flag": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "norm": torch.tensor([0.5, -1.5]),
        "head": torch.arange(8, dtype=torch.bfloat16).reshape(2, 4),
        "scale": torch.tensor(7.25),
    }
    content = torch.cat([each.reshape(-1).view(torch.uint8) for each in sent.values()])
    tensors = TensorSet(FORMS)
    tensors.add(plan_of(FORMS, 0).placed, content)
    got = dict(tensors.tensors())
    assert [*got] == [*sent]
    assert all(torch.equal(got[name], sent[name]) for name in sent)
    assert all(got[name].dtype == sent[name].dtype for name in sent)


def test_bucket_of_empty_tensors_is_a_bucket() -> None:
    plan = plan_of([TensorForm("none", "F32", (0, 4))], None)
    assert plan.order.pieces == [Piece("float32", 0, 0)]
    assert plan.order.size_bytes > 0


def test_what_is_missing_is_named_and_what_does_not_belong_is_refused() -> None:
    tensors = TensorSet(FORMS)
    tensors.add(plan_of([NORM, HEAD], None).placed, torch.zeros(256, dtype=torch.uint8))
    assert tensors.sentence == "2 of 4 tensors are in; missing: 'flag', 'scale'"
    wrong = {
        "norm": [NORM],
        "flag": [FLAG, FLAG],
        "scale": [TensorForm("scale", "F32", (1,))],
        "other": [TensorForm("other", "F32", (1,))],
    }
    for name, forms in wrong.items():
        problem = tensors.problem_of(forms)
        assert problem is not None
        assert problem.field == f"tensors.{name}"
    assert tensors.problem_of([FLAG, SCALE]) is None
    tensors.forget()
    assert tensors.n_in == 0
