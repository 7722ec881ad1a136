"""The benchmark of whole command paths: its arguments, what it misses, and how it judges."""

import pytest

from benchmarks.command_path import WAYS, missing, parser_of_options, row_of, table, verdicts


def _sample(per_s: float) -> dict[str, float]:
    return {"n": 100, "per_s": per_s, "p50_ms": 1.0, "p99_ms": 2.0, "cpu_s": 0.01}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--peers", "nat"], "there is no path 'nat'; did you mean nats?"),
        (["--peers", "kafka"], "there is no path 'kafka'; there are ports, zmq, nats"),
        (["--in-flight", "0"], "a whole number from 1 on, not '0'"),
        (["--workers", "two"], "a whole number from 1 on, not 'two'"),
        (["--seconds", "-1"], "seconds, above 0 and at most 60, not '-1'"),
        (["--seconds", "nan"], "seconds, above 0 and at most 60, not 'nan'"),
    ],
)
def test_an_argument_that_cannot_be_is_told(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser_of_options().parse_args(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_peer_that_is_named_twice_is_measured_once() -> None:
    assert parser_of_options().parse_args(["--peers", "zmq, ray,zmq"]).peers == ["zmq", "ray"]


def test_what_a_path_misses_is_told_with_what_to_do() -> None:
    assert missing("zmq", []) == ""
    told = ".venv-bench has no fastapi and no uvicorn: make .venv-bench/.installed"
    assert missing("httpx", ["httpx"]) == told


def test_a_server_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.command_path.SERVER_PLACES", [])
    monkeypatch.setenv("PATH", "")
    told = "there is no nats-server on the PATH: apt install nats-server"
    assert missing("nats", WAYS["nats"].packages) == told


def test_ratios_are_medians_of_the_rounds_and_judged_by_their_goal() -> None:
    ours = [_sample(per_s) for per_s in (1000.0, 900.0, 1000.0)]
    rows = [
        row_of("zmq", 256, [_sample(100.0), _sample(100.0), _sample(50.0)], ours),
        row_of("nats", 256, [_sample(1000.0)] * 3, ours),
        row_of("nats", 64, [_sample(100.0)] * 3, ours),
        row_of("grpc", 256, [_sample(100.0)] * 3, ours),
    ]
    assert rows[0]["rolloutbus_ratios"] == [10, 9, 20]
    assert verdicts(rows) == [
        {"path": "zmq", "goal": 10.0, "ratio": 10.0, "is_met": True},
        {"path": "nats", "goal": 2.0, "ratio": 1.0, "is_met": False},
    ]


def test_a_path_that_fails_has_no_figures_and_says_why() -> None:
    failed = {"failed": "ReadError: it closed"}
    row = row_of("httpx", 256, [_sample(10.0), failed], [_sample(100.0)] * 2)
    assert row == {"path": "httpx", "in_flight": 256, **failed}
    ours = row_of("zmq", 256, [_sample(10.0)], [failed])
    assert "rolloutbus_ratio" not in ours
    assert verdicts([row, ours]) == []
    told = table({"rows": [row, ours], "not_measured": {"ray": "too big"}, "goals": []})
    assert "failed: ReadError: it closed" in told
    assert "ray: not measured: too big" in told
