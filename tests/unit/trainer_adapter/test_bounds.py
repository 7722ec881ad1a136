"""However many requests a client has had, it remembers those that are open."""

import pytest

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Member, Members
from rolloutbus.trainer_adapter.client.core.requests import MAX_DEAD
from tests.unit.sizes import largest
from tests.unit.trainer_adapter.bench import Bench, generated

pytestmark = pytest.mark.timeout(900)

N_RIDS = 20_000
"""Each crosses the codec several times."""
FEW = 40
MIN_STALE = 1024
"""Outdated items that a timetable may keep."""


def _forget_what_was_said(bench: Bench) -> None:
    for said in (bench.sent, bench.effects, bench.outcomes, bench.deltas):
        said.clear()


def test_requests_that_ended_are_forgotten() -> None:
    bench = Bench()
    bench.welcome()
    for n in range(N_RIDS):
        rid = bench.generate(deadline_s=1e6)
        bench.accept(rid, (1, n + 1), worker=f"w{n}")
        bench.finish(rid, (1, n + 1), generated(1, 2), worker=f"w{n}")
        if n % 100 == 0:
            bench.pass_time(0.05)
            _forget_what_was_said(bench)
    bench.pass_time(1.0)
    assert bench.core.n_open == 0
    assert largest(bench.core)[0] <= 2 * MIN_STALE


def test_workers_that_came_and_went_are_forgotten() -> None:
    bench = Bench()
    bench.welcome()
    for n in range(1000):
        here = [
            Member(f"w{n}.{i}", "e.1", f"ipc:///{n}.{i}", "ready", 0, "default") for i in range(100)
        ]
        bench.say("members", Members(here))
        if n % 100 == 0:
            bench.pass_time(10.5)
            _forget_what_was_said(bench)
    bench.pass_time(10.5)
    assert largest(bench.core)[0] <= 100


def test_void_executions_of_one_patient_request_are_bounded() -> None:
    bench = Bench()
    bench.welcome()
    rid = bench.generate(deadline_s=1e6)
    for n in range(4 * MAX_DEAD):
        bench.refuse(rid, Problem("not_ready", "later", "not_started"), (1, n + 1))
        bench.pass_time(0.05)
    _forget_what_was_said(bench)
    assert bench.core.n_open == 1
    assert largest(bench.core)[0] == MAX_DEAD
