import numpy as np

from rolloutbus import Rollout
from rolloutbus.examples.rollouts import BusyClock, Group, Ledger


def _rollout(rid: str, versions: list[tuple[int, int]], n_resumed: int = 0) -> Rollout:
    n_tokens = sum(n for _, n in versions)
    logprobs = np.zeros(n_tokens, np.float32)
    return Rollout(
        rid=rid,
        tokens=np.zeros(n_tokens, np.int32),
        logprobs=logprobs,
        behaviour_logprobs=logprobs,
        version_runs=versions,
        finish_reason="length",
        worker="w0",
        n_prompt_tokens=3,
        n_attempts=1,
        n_resumed=n_resumed,
        queue_ms=0.0,
        run_ms=0.0,
    )


def test_what_was_asked_for_and_never_finished_is_lost() -> None:
    ledger = Ledger(n_requested=3)

    ledger.finish(_rollout("c/1", [(0, 2)]))
    ledger.finish(_rollout("c/2", [(0, 2)]))

    assert ledger.n_lost == 1


def test_second_ending_of_a_rollout_hides_no_loss() -> None:
    ledger = Ledger(n_requested=2)

    ledger.finish(_rollout("c/1", [(0, 2)]))
    ledger.finish(_rollout("c/1", [(0, 2)]))

    assert ledger.n_lost == 1


def test_rollouts_that_kept_tokens_of_a_lost_worker_are_counted_once_each() -> None:
    ledger = Ledger(n_requested=2)

    ledger.finish(_rollout("c/1", [(0, 9)], n_resumed=5))
    ledger.finish(_rollout("c/2", [(0, 9)]))

    assert ledger.n_resumed == 1


def test_versions_of_a_group_are_those_of_each_of_its_tokens() -> None:
    group = Group("abc", [_rollout("c/1", [(3, 2), (4, 1)]), _rollout("c/2", [(4, 3)])])

    assert group.token_versions.tolist() == [3, 3, 4, 4, 4, 4]


def test_busy_clock_adds_up_busy_spans_only() -> None:
    now = 10.0
    busy = BusyClock(clock=lambda: now)

    busy.set_busy(is_busy=True)
    now = 12.0
    busy.set_busy(is_busy=True)
    now = 13.0
    busy.set_busy(is_busy=False)
    now = 20.0
    busy.set_busy(is_busy=True)
    now = 21.0

    assert busy.read_s() == 4.0
