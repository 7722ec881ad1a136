"""A replica that stands still before work is not hidden by those that go on."""

from rolloutbus.engine_worker.engines.sglang.engine import Progress
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import Pulse, SchedulerRank

ONE, OTHER = SchedulerRank(0, 0, 0), SchedulerRank(1, 0, 0)


def pulse(n_forwards: int, n_running: int = 3) -> Pulse:
    return Pulse(n_forwards, n_running, 0, 0)


def test_a_single_scheduler_counts_its_steps() -> None:
    progress = Progress()
    assert [progress.steps({ONE: pulse(n)}) for n in (0, 5, 5, 9)] == [0, 5, 5, 9]


def test_replicas_that_work_count_together() -> None:
    progress = Progress()
    assert [progress.steps({ONE: pulse(n), OTHER: pulse(2 * n)}) for n in (1, 2, 3)] == [3, 6, 9]


def test_a_replica_that_hangs_stops_the_count() -> None:
    progress = Progress()
    counted = [progress.steps({ONE: pulse(n), OTHER: pulse(7)}) for n in (1, 2, 3)]
    assert counted == [8, 8, 8]
    assert progress.steps({ONE: pulse(4), OTHER: pulse(8)}) == 12


def test_a_replica_with_nothing_to_do_does_not() -> None:
    progress = Progress()
    counted = [progress.steps({ONE: pulse(n), OTHER: pulse(7, 0)}) for n in (1, 2, 3)]
    assert counted == [8, 9, 10]
