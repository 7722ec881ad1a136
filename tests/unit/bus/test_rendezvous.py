import pytest

from rolloutbus.bus.weights.rank_group import (
    BadReport,
    RankReport,
    read_report,
    read_timeout_s,
    read_world,
    why_not,
    write_report,
)


def test_a_report_is_read_as_it_was_written() -> None:
    report = RankReport(problem="no room", gpu="GPU-1")
    assert read_report(write_report(report).encode()) == report


@pytest.mark.parametrize("value", [b"", b"[]", b'{"problem": 1}', b'{"else": ""}', b"\xff"])
def test_anything_else_is_no_report(value: bytes) -> None:
    with pytest.raises(BadReport):
        read_report(value)


@pytest.mark.parametrize("value", [b"", b"1", b"0", b"-2", b"2.0", b"x", b"9" * 5000, b"10001"])
def test_a_world_has_at_least_two_ranks_and_not_too_many(value: bytes) -> None:
    with pytest.raises(BadReport):
        read_world(value)


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"1.5", b"9" * 5000, b"86400001"])
def test_a_timeout_is_above_0_and_at_most_a_day(value: bytes) -> None:
    assert read_timeout_s(b"1500") == 1.5
    with pytest.raises(BadReport):
        read_timeout_s(value)


def test_a_group_begins_when_nobody_has_a_problem() -> None:
    assert read_world(b"3") == 3
    assert why_not("", [RankReport(), RankReport()]) == ""
    assert why_not("GPU-0", [RankReport(gpu="GPU-1"), RankReport(gpu="GPU-2")]) == ""


def test_one_rank_with_a_problem_is_named() -> None:
    assert why_not("", [RankReport(), RankReport("no room")]) == "rank 2: no room"


def test_two_ranks_cannot_share_a_gpu() -> None:
    assert "GPU-1" in why_not("GPU-1", [RankReport(gpu="GPU-1")])
    assert "GPU-2" in why_not("GPU-1", [RankReport(gpu="GPU-2"), RankReport(gpu="GPU-2")])
