"""What comes of a command before which workers were paused: pause, command and resume in one."""

from rolloutbus.bus.wire.messages.control import Memory
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.errors import DeadlineExceeded, Refused
from rolloutbus.trainer_adapter.client.commands import of_second, undrained
from rolloutbus.types import FleetResult

ASLEEP = Memory({"weights": 1}, ["weights"])
BUSY = Refused(Problem("busy", "3 requests run; pause first", "not_started", retry_after_ms=1000))
GONE_ON = FleetResult({"w0": Done()})


def test_a_worker_that_drained_late_and_did_the_command_has_done_both() -> None:
    result = of_second([FleetResult({}, ["w0"]), FleetResult({"w0": ASLEEP}), GONE_ON])
    assert (result.by_worker, result.silent) == ({"w0": ASLEEP}, [])


def test_a_worker_that_was_lost_after_its_pause_is_silent() -> None:
    result = of_second([FleetResult({}, ["w0"]), FleetResult({}), FleetResult({})])
    assert (result.by_worker, result.silent) == ({}, ["w0"])


def test_a_worker_that_does_not_go_on_is_silent_although_it_did_the_command() -> None:
    result = of_second([GONE_ON, FleetResult({"w0": ASLEEP}), FleetResult({}, ["w0"])])
    assert (result.by_worker, result.silent) == ({}, ["w0"])


def test_a_worker_that_could_not_be_drained_says_what_still_runs() -> None:
    result = undrained(FleetResult({"w0": BUSY, "w1": ASLEEP}), ["w0", "w1"], 0.5)
    error = result.by_worker["w0"]
    assert isinstance(error, Refused)
    assert (error.code, error.retry_after_ms) == ("busy", 1000)
    assert "what runs there had not ended after 0.5 s: 3 requests run; give it" in str(error)
    assert result.by_worker["w1"] is ASLEEP


def test_a_worker_that_neither_drained_nor_answered_is_told_as_late() -> None:
    result = undrained(FleetResult({}, ["w0", "w1"]), ["w0"], 2.0)
    assert isinstance(result.by_worker["w0"], DeadlineExceeded)
    assert result.silent == ["w1"]
