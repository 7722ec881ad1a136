"""What `rolloutbus status` shows besides its table."""

from typing import Literal

import msgspec
import pytest
import typer
from rich.console import Console

from rolloutbus.bus.wire.messages.control import FleetStatus, StoreStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.cli.commands.status import probe, report


def _found(state: str = "stale", absent: dict[str, str] | None = None) -> FleetStatus:
    row = ("w0", "e", state, "default", 6, "fake", 4, 0, 0, 10, 0.0, 42)
    return FleetStatus(
        router_epoch=1,
        instance="r",
        recovering=False,
        workers=[WorkerStatus(*row, blocked_by={"behind": "It is old."})],
        committed={"default": 7},
        n_queued=0,
        n_running=0,
        n_clients=0,
        counters={},
        absent=absent or {},
    )


@pytest.mark.parametrize("state", ["ready", "updating", "paused", "asleep"])
def test_a_probe_passes_a_worker_that_is_as_it_should_be(
    state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    probe(_found(state), "w0", as_json=False)
    assert capsys.readouterr().out == f"w0 is {state}\n"


@pytest.mark.parametrize(
    ("name", "absent", "why"),
    [
        ("w0", {}, "error: w0 is stale. It is old.\n"),
        ("w1", {}, "error: w1 is not here\n"),
        ("w1", {"w1": "left"}, "error: w1 is not here: left\n"),
        ("store", {}, "error: store is not here\n"),
    ],
)
def test_a_probe_fails_with_the_reason(
    name: str, absent: dict[str, str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        probe(_found(absent=absent), name, as_json=True)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == why


def test_cached_beginnings_have_a_column_where_workers_tell_of_them() -> None:
    def words(n_marks: int) -> list[str]:
        quiet = _found()
        workers = [msgspec.structs.replace(quiet.workers[0], n_marks=n_marks)]
        console = Console(width=200)
        with console.capture() as shown:
            console.print(report(msgspec.structs.replace(quiet, workers=workers)))
        return shown.get().split()

    assert "prefixes" not in words(0)
    assert {"prefixes", "1,234"} <= set(words(1234))


def _lines(
    problem: str = "",
    updates: list[UpdateStatus] | None = None,
    blocked_by: dict[str, str] | None = None,
    troubled: dict[str, str] | None = None,
    absent: dict[str, str] | None = None,
    standby: Literal["", "ready", "missing"] = "",
    *,
    n_unwritten: int = 0,
) -> list[str]:
    row = ("w0", "e", "stale", "default", 6, "fake", 4, 0, 0, 10, 0.0, 42)
    found = FleetStatus(
        router_epoch=1,
        instance="r",
        recovering=False,
        workers=[WorkerStatus(*row, problem=problem, blocked_by=blocked_by or {})],
        committed={"default": 7},
        n_queued=0,
        n_running=0,
        n_clients=0,
        counters={},
        updates=updates or [],
        troubled=troubled or {},
        absent=absent or {},
        standby=standby,
        store=StoreStatus("store", 120, {"unwritten_versions": n_unwritten}),
    )
    return [str(each) for each in report(found).renderables[1:]]


def test_worker_in_quarantine_is_shown_with_its_reason() -> None:
    reason = "digest_mismatch: a tensor differs"
    assert f"w0 gets no work until it has caught up: {reason}" in _lines(reason)


def test_each_reason_why_a_worker_gets_no_work_is_shown_once() -> None:
    blocked_by = {"behind": "It is old.", "paused": "It is paused.", "tripped": "It failed."}
    lines = _lines("a tensor differs", None, blocked_by, {"w0": "engine_failed"})
    assert lines[:-1] == [
        "w0 gets no work until it has caught up: a tensor differs",
        "w0 gets no work: It is paused.",
        "w0 gets no work: engine_failed",
    ]


def test_of_a_paused_worker_it_is_not_said_that_its_state_takes_no_requests() -> None:
    [line, _] = _lines(blocked_by={"not_ready": "Its own state.", "paused": "It is paused."})
    assert line == "w0 gets no work: It is paused."
    [line, _] = _lines(blocked_by={"not_ready": "Its own state."})
    assert line == "w0 gets no work: Its own state."


def test_workers_that_are_away_are_shown_with_the_reason() -> None:
    lines = _lines(absent={"w1": "it was lost (expired)"})
    assert "w1 is not here: it was lost (expired)" in lines


def test_versions_that_are_not_in_the_stores_directory_are_told() -> None:
    warning, _ = _lines(n_unwritten=2)
    assert warning.startswith("the store could not write the last version to its directory")


def test_quiet_fleet_has_one_line_about_its_router() -> None:
    [line] = _lines()
    assert "committed: default v7" in line


def test_updates_under_way_are_shown() -> None:
    lines = _lines(updates=[UpdateStatus("default", 8, "committing", 1500, 4, 3, 1)])
    assert "default v8 is committing for 1.5 s: 3 of 4 prepared, 1 active" in lines


def test_the_standby_of_the_router_is_shown_and_missed() -> None:
    [line] = _lines(standby="ready")
    assert "router epoch 1 | standby ready | committed" in line
    warning, line = _lines(standby="missing")
    assert warning == "the router that is to stand by for this one does not show itself"
    assert "standby missing" in line
