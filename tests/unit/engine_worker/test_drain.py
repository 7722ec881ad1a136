"""A worker that is told to leave by SIGTERM lets what runs end, for as long as it may."""

import numpy as np
import pytest

from rolloutbus.bus.actor.effects import Stop
from rolloutbus.bus.wire.codec import array_of
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.control import Embed, Embedded, Shutdown
from rolloutbus.bus.wire.messages.weights import PrepareUpdate
from rolloutbus.engine_worker.settings import WorkerSettings
from tests.unit.engine_worker.core_bench import Bench

DRAIN_S = 10.0


@pytest.fixture
def draining() -> Bench:
    """A worker that has joined and gets some time."""
    bench = Bench(drain_s=DRAIN_S)
    bench.join()
    return bench


def has_left(bench: Bench) -> bool:
    return any(isinstance(effect, Stop) for effect in bench.said.effects)


def test_a_worker_without_work_leaves_at_once(draining: Bench) -> None:
    draining.told_to_leave()
    assert has_left(draining)
    assert draining.said.sent("goodbye")


def test_a_worker_whose_engine_is_not_up_yet_leaves_at_once() -> None:
    bench = Bench(drain_s=DRAIN_S)
    bench.told_to_leave()
    assert has_left(bench)


def test_what_runs_ends_and_nothing_new_begins(draining: Bench) -> None:
    draining.generate("c/1")
    draining.told_to_leave()
    assert draining.said.heartbeat().state == "draining"
    draining.generate("c/2")
    assert draining.said.problem("c/2")[:2] == ("refused", "not_ready")
    assert not has_left(draining)
    draining.step({"c/1": [1]}, {"c/1": "stop"})
    assert draining.said.ending("c/1").kind == "finished"
    draining.pass_time(2.1)  # its result is given time to be acknowledged
    assert has_left(draining)


def test_when_its_time_is_over_it_leaves_what_runs_to_others(draining: Bench) -> None:
    draining.generate("c/1", deadline_s=100.0)
    draining.told_to_leave()
    draining.pass_time(DRAIN_S - 0.2)
    assert not has_left(draining)
    draining.pass_time(0.4)
    assert has_left(draining)
    assert draining.said.sent("goodbye")
    assert not draining.said.sent("cancelled", "c/1")


def test_the_second_signal_is_obeyed_at_once(draining: Bench) -> None:
    draining.generate("c/1")
    draining.told_to_leave()
    draining.told_to_leave()
    assert has_left(draining)


def test_without_time_it_leaves_at_once(bench: Bench) -> None:
    bench.generate("c/1")
    bench.told_to_leave()
    assert has_left(bench)


def test_a_command_that_the_engine_carries_out_is_ended_too(draining: Bench) -> None:
    prompt = np.array([1, 2], np.int32).tobytes()
    draining.command("embed", "c/1@w0", Embed([prompt]))
    draining.told_to_leave()
    assert not has_left(draining)
    draining.host_ends("finished", "c/1@w0", Embedded(array_of(np.ones((1, 4), np.float32)), 2))
    assert draining.said.ending("c/1@w0").kind == "finished"
    draining.pass_time(2.1)
    assert has_left(draining)


def test_weights_on_their_way_are_not_waited_for(draining: Bench) -> None:
    draining.command("prepare_update", "c/1@w0", PrepareUpdate("default", 4, "ipc:///bulk"))
    draining.told_to_leave()
    assert has_left(draining)


def test_a_shutdown_that_comes_meanwhile_is_ended(draining: Bench) -> None:
    draining.generate("c/1")
    draining.told_to_leave()
    draining.command("shutdown", "c/2@w0", Shutdown(drain=True))
    draining.step({"c/1": [1]}, {"c/1": "stop"})
    assert draining.said.ending("c/2@w0").kind == "finished"


def test_all_who_told_it_to_leave_hear_that_it_does(draining: Bench) -> None:
    draining.generate("c/1")
    draining.command("shutdown", "a/1@w0", Shutdown(drain=True))
    draining.command("shutdown", "b/1@w0", Shutdown(drain=True))
    draining.step({"c/1": [1]}, {"c/1": "stop"})
    for rid in ("a/1@w0", "b/1@w0"):
        assert draining.said.ending(rid).kind == "finished"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(SettingsError, match="drain_s"):
        WorkerSettings("w0", "ipc:///r", drain_s=seconds)
