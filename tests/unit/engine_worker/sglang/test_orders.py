"""Orders and answers survive their disguise as the name and the numbers of a weight."""

import pytest

from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    FindTensors,
    Install,
    Order,
    Placed,
    Read,
    SchedulerAnswer,
    Stage,
    TensorRows,
    Unstage,
    answer_of,
    as_name,
    as_numbers,
    order_of,
)

TENSOR = CheckpointTensor("model.norm.weight", "BF16", (3, 4))
ORDERS: list[Order] = [
    FindTensors([TENSOR]),
    Stage(7, ["/proc/1/fd/3"], [Placed(TENSOR, 0, 64)]),
    Unstage(7),
    Install(7, "finish_old"),
    Read("/proc/1/fd/4", [TensorRows("model.norm.weight", 1, 2, 64)]),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_is_what_its_name_says(order: Order) -> None:
    assert order_of(as_name(order)) == order


def test_the_name_of_a_weight_is_no_order() -> None:
    assert order_of("model.norm.weight") is None


def test_an_answer_is_what_its_numbers_say() -> None:
    answer = SchedulerAnswer(
        problem="größer", is_busy=True, version=3, dtypes=["F32", ""], unreadable=["a"]
    )
    numbers = as_numbers(answer)
    assert {type(number) for number in numbers} == {float}
    assert answer_of(numbers) == answer
