"""An update has happened when every scheduler says so; a part of them is worse than none."""

import pytest

from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    SchedulerAnswer,
    SchedulerRank,
    Swapped,
)
from rolloutbus.engine_worker.engines.sglang.weights import held_between, one_outcome

RANKS = [SchedulerRank(dp, pp, tp) for dp in range(2) for pp in range(2) for tp in range(2)]
DONE = Swapped(7, 3.0, n_retracted=2, n_aborted=1)
BUSY = Swapped(7, 0.0, problem="asleep", is_busy=True)
FAILED = Swapped(7, 0.0, problem="no room", is_torn=True)


def test_of_each_replica_requests_count_once() -> None:
    slow = {rank: Swapped(7, 5.0, 2, 1) if rank.tp else DONE for rank in RANKS}
    assert one_outcome(slow) == Swapped(7, 5.0, n_retracted=4, n_aborted=2)


def test_what_nobody_did_can_be_asked_for_again() -> None:
    outcome = one_outcome(dict.fromkeys(RANKS, BUSY))
    assert (outcome.problem, outcome.is_busy, outcome.is_torn) == ("asleep", True, False)


@pytest.mark.parametrize("report", [BUSY, FAILED], ids=["busy", "failed"])
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_what_one_scheduler_did_not_do_is_torn(rank: SchedulerRank, report: Swapped) -> None:
    outcome = one_outcome({**dict.fromkeys(RANKS, DONE), rank: report})
    assert outcome.is_torn
    assert not outcome.is_busy
    assert outcome.problem.startswith(report.problem)
    assert str(rank) in outcome.problem


def test_one_torn_scheduler_tears_the_engine() -> None:
    assert one_outcome({**dict.fromkeys(RANKS, BUSY), RANKS[-1]: FAILED}).is_torn


def test_stages_have_the_checkpoint_between_them() -> None:
    names = ["embed", "layer.0", "layer.1", "rotary", "fused"]
    tensors = [CheckpointTensor(name, "F32", (4,)) for name in names]
    first = SchedulerAnswer(dtypes=["F32", "BF16", "", "", "F32"], unreadable=["fused", "layer.1"])
    # The last stage has the embeddings, too, as the weights of its head, and cannot read them.
    last = SchedulerAnswer(dtypes=["F32", "", "BF16", "", ""], unreadable=["embed"])

    specs, unreadable = held_between(tensors, [first, last])

    dtypes = {name: spec.dtype for name, spec in specs.items()}
    assert dtypes == {"embed": "F32", "layer.0": "BF16", "layer.1": "BF16", "fused": "F32"}
    assert unreadable == {"fused"}
