"""Version rules: text in, text out, and what each accepts."""

import random

import pytest

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.versions import MAX_VERSION, VersionRule, parse_versions

TEXTS = ["any", "latest", "min:0", "min:7", f"exact:{MAX_VERSION}", "max-staleness:2"]


def _rule(text: str) -> VersionRule:
    rule = parse_versions(text)
    assert isinstance(rule, VersionRule), rule
    return rule


@pytest.mark.parametrize("text", TEXTS)
def test_rule_prints_as_it_was_read(text: str) -> None:
    assert str(_rule(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Any",
        "any ",
        "any:1",
        "latest:3",
        "min",
        "min:",
        "min:-1",
        "min:+1",
        "min:01",
        "min: 1",
        "min:1.0",
        "min:1_0",
        "min:１",  # noqa: RUF001 - a full-width digit is the point
        "min:1\n",
        "exact:x",
        "max-staleness:-1",
        "max_staleness:1",
        f"min:{MAX_VERSION + 1}",
        "min:" + "9" * 400,
    ],
)
def test_bad_rule_is_a_problem_that_names_the_field(text: str) -> None:
    problem = parse_versions(text)
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("bad_request", "place.versions")
    assert problem.outcome == "not_started"


@pytest.mark.parametrize(
    ("text", "committed", "accepted", "refused"),
    [
        ("any", 5, [0, 5, 9], []),
        ("latest", 5, [5, 6], [0, 4]),
        ("min:3", 5, [3, 5, 8], [0, 2]),
        ("exact:3", 5, [3], [2, 4, 5]),
        ("max-staleness:2", 5, [3, 4, 5], [0, 2]),
        ("max-staleness:0", 5, [5], [4]),
        ("max-staleness:9", 5, [0, 5], []),
    ],
)
def test_rule_accepts_only_what_it_says(
    text: str, committed: int, accepted: list[int], refused: list[int]
) -> None:
    rule = _rule(text)
    assert [v for v in accepted if not rule.accepts(v, committed)] == []
    assert [v for v in refused if rule.accepts(v, committed)] == []


@pytest.mark.parametrize(
    ("text", "concrete"),
    [
        ("any", "any"),
        ("latest", "min:5"),
        ("min:3", "min:3"),
        ("exact:3", "exact:3"),
        ("max-staleness:2", "min:3"),
        ("max-staleness:9", "min:0"),
    ],
)
def test_concrete_rule_needs_no_committed_version(text: str, concrete: str) -> None:
    assert _rule(text).concrete(5) == concrete


def test_concrete_rule_accepts_exactly_what_the_rule_did(rng: random.Random) -> None:
    for _ in range(500):
        kind = rng.choice(["any", "latest", "min:{}", "exact:{}", "max-staleness:{}"])
        rule, committed = _rule(kind.format(rng.randrange(8))), rng.randrange(8)
        concrete = _rule(rule.concrete(committed))
        for version in range(10):
            assert concrete.accepts(version, 0) == rule.accepts(version, committed)
