"""What `rolloutbus status` shows besides its table."""

from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.cli.commands.status import report


def _lines(problem: str = "", updates: list[UpdateStatus] | None = None) -> list[str]:
    row = ("w0", "e", "stale", "default", 6, "fake", 4, 0, 0, 10, 0.0, 42)
    found = FleetStatus(
        router_epoch=1,
        instance="r",
        recovering=False,
        workers=[WorkerStatus(*row, problem=problem)],
        committed={"default": 7},
        n_queued=0,
        n_running=0,
        n_clients=0,
        counters={},
        updates=updates or [],
    )
    return [str(each) for each in report(found).renderables[1:]]


def test_worker_in_quarantine_is_shown_with_its_reason() -> None:
    reason = "digest_mismatch: a tensor differs"
    assert f"w0 gets no work until it has caught up: {reason}" in _lines(reason)


def test_quiet_fleet_has_one_line_about_its_router() -> None:
    [line] = _lines()
    assert "committed: default v7" in line


def test_updates_under_way_are_shown() -> None:
    lines = _lines(updates=[UpdateStatus("default", 8, "committing", 1500, 4, 3, 1)])
    assert "default v8 is committing for 1.5 s: 3 of 4 prepared, 1 active" in lines
