"""A host that is stopped, hung or dead is told apart from one that is busy."""

import pytest

from rolloutbus.bus.wire.messages.host import EngineHeartbeat
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.engine_worker.worker.host_watch import HostWatch

TICK_S = 0.25
LATE_TICK_S = 1.0


class Watched:
    """A ready host that speaks and steps as a test wants."""

    def __init__(self, settings: HostSettings | None = None) -> None:
        self.now = 100.0
        self.steps = 0
        self.watch = HostWatch(settings or HostSettings(), LATE_TICK_S)
        self.watch.started(self.now)
        self.watch.ready(self.now)

    def lives(
        self, seconds: float, *, speaks: bool = True, steps: bool = True, **work: bool
    ) -> str:
        """Time passes; returns the first verdict against it."""
        verdict = ""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.steps += steps
            if speaks:
                self.watch.spoke(self.now)
                self.watch.reported(EngineHeartbeat(self.steps, 1, 0, 0, 0), self.now)
            verdict = verdict or self.watch.verdict(self.now, **{"should_move": True, **work})
        return verdict


def test_host_is_silent_after_a_while_and_not_once_it_speaks_again() -> None:
    host = Watched()
    host.lives(1.5, speaks=False)
    assert not host.watch.is_silent(host.now)
    host.lives(0.25, speaks=False)
    assert host.watch.is_silent(host.now)
    host.lives(0.25)
    assert not host.watch.is_silent(host.now)


def test_host_that_is_not_ready_is_not_called_silent() -> None:
    host = Watched()
    host.watch.started(host.now)
    assert host.lives(100, speaks=False) == ""
    assert not host.watch.is_silent(host.now)
    assert "within 600 s" in host.lives(501, speaks=False)


def test_steps_that_stand_still_under_work_are_found_though_the_host_speaks() -> None:
    host = Watched()
    assert host.lives(30, steps=False) == ""
    assert host.lives(0.25, steps=False) == "the engine makes no progress"


@pytest.mark.parametrize(("n_waiting", "verdict"), [(2, ""), (3, "the engine makes no progress")])
def test_requests_whose_grammars_are_being_made_alone_make_no_steps(
    n_waiting: int, verdict: str
) -> None:
    host, found = Watched(), ""
    for _ in range(round(60 / TICK_S)):
        host.now += TICK_S
        host.watch.spoke(host.now)
        host.watch.reported(EngineHeartbeat(0, 0, n_waiting, 0, 0, n_held=2), host.now)
        found = host.watch.verdict(host.now, should_move=True)
    assert found == verdict


def test_idle_host_need_not_step() -> None:
    host = Watched()
    assert host.lives(1000, steps=False, should_move=False) == ""


def test_silent_host_is_given_up_even_without_work() -> None:
    host = Watched()
    assert host.lives(30, speaks=False, should_move=False) == ""
    assert host.lives(0.25, speaks=False, should_move=False) == "the engine host does not answer"


def test_moving_weights_may_take_long_and_the_steps_get_their_time_anew_afterwards() -> None:
    host = Watched()
    assert host.lives(299, steps=False, speaks=False, in_phase=True, should_move=False) == ""
    assert host.lives(29, steps=False) == ""
    assert host.lives(2, steps=False) == "the engine makes no progress"


def test_moving_weights_for_ever_is_found_too() -> None:
    host = Watched()
    verdict = host.lives(301, steps=False, in_phase=True, should_move=False)
    assert verdict == "the engine makes no progress"


def test_our_own_pause_is_not_charged_to_the_host() -> None:
    host = Watched()
    host.now += 100
    assert host.watch.verdict(host.now, should_move=True) == ""
    assert not host.watch.is_silent(host.now)


def _end(watch: HostWatch, now: float, *, was_killed: bool) -> tuple[str, str, bool]:
    end = watch.ended("it ended", now, was_killed=was_killed)
    return end.reason, end.goodbye, end.may_restart


@pytest.mark.parametrize(
    ("was_killed", "goodbye"), [(True, "engine_killed"), (False, "engine_crashed")]
)
def test_goodbye_says_whether_the_engine_is_to_blame(was_killed: bool, goodbye: str) -> None:
    watch = Watched().watch
    assert _end(watch, 100, was_killed=was_killed) == ("it ended", goodbye, True)


def test_host_that_said_that_its_engine_failed_has_crashed_whoever_killed_it() -> None:
    watch = Watched().watch
    watch.complained("CUDA error")
    assert _end(watch, 100, was_killed=True)[:2] == ("CUDA error", "engine_crashed: CUDA error")


def test_what_one_host_said_is_not_laid_at_the_next_ones_door() -> None:
    host = Watched()
    host.watch.complained("CUDA error")
    host.watch.ended("it ended", 100, was_killed=False)
    host.watch.started(101)
    host.watch.ready(102)
    assert _end(host.watch, 103, was_killed=True)[:2] == ("it ended", "engine_killed")


def test_six_ends_in_a_minute_are_too_many_and_five_are_not() -> None:
    host = Watched()
    for n in range(5):
        assert host.watch.ended("x", 100 + n, was_killed=True).may_restart
        host.watch.started(100 + n)
        host.watch.ready(100 + n)
    assert host.watch.ended("x", 170, was_killed=True).may_restart
    for n in range(4):
        host.watch.started(171 + n)
        host.watch.ready(171 + n)
        assert host.watch.ended("x", 171 + n, was_killed=True).may_restart
    host.watch.started(176)
    host.watch.ready(176)
    assert not host.watch.ended("x", 176, was_killed=True).may_restart


def test_starts_that_fail_one_after_the_other_are_counted_however_long_they_take() -> None:
    host = Watched()
    host.watch.ended("x", 100, was_killed=False)
    for n in range(5):
        host.watch.started(200 * (n + 1))
        assert host.watch.ended("x", 200 * (n + 2), was_killed=False).may_restart
    host.watch.started(2000)
    assert not host.watch.ended("x", 2100, was_killed=False).may_restart
