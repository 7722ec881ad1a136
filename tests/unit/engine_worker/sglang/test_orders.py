"""Orders survive their disguise as the name of a weight, and answers their way back."""

import pytest

from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    HEADER,
    Answered,
    CheckpointTensor,
    FindTensors,
    Halt,
    Install,
    Order,
    Placed,
    Read,
    SchedulerAnswer,
    Stage,
    TensorRows,
    Unstage,
    as_name,
    decode,
    framed,
    order_of,
)

TENSOR = CheckpointTensor("model.norm.weight", "BF16", (3, 4))
ORDERS: list[Order] = [
    FindTensors([TENSOR]),
    Stage(7, ["/proc/1/fd/3"], [Placed(TENSOR, 0, 64)]),
    Unstage(7),
    Install(7, "finish_old"),
    Read("/proc/1/fd/4", [TensorRows("model.norm.weight", 1, 2, 64)]),
    Halt(),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_is_what_its_name_says(order: Order) -> None:
    assert order_of(as_name(12, order)) == (12, order)


def test_the_name_of_a_weight_is_no_order() -> None:
    assert order_of("model.norm.weight") is None


def test_an_answer_comes_back_with_the_number_of_its_order() -> None:
    answer = SchedulerAnswer(
        problem="größer", is_busy=True, version=3, dtypes=["F32", ""], unreadable=["a"]
    )
    assert decode(framed(Answered(12, answer))[HEADER.size :]) == Answered(12, answer)
