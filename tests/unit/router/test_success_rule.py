"""How many workers a publication needs."""

import pytest

from rolloutbus.router.updates.record import n_needed


@pytest.mark.parametrize(
    ("require", "n_targets", "needed"),
    [
        ("all", 4, 4),
        ("quorum", 4, 3),
        ("quorum", 5, 3),
        ("any", 4, 1),
        ("at-least:3", 4, 3),
        ("at-least:9", 4, 9),
    ],
)
def test_rules(require: str, n_targets: int, needed: int) -> None:
    assert n_needed(require, n_targets) == needed


@pytest.mark.parametrize(
    "require",
    [
        "",
        "most",
        "all:2",
        "any:",
        "at-least",
        "at-least:",
        "at-least:0",
        "at-least:-1",
        "at-least:²",
    ],
)
def test_other_words_are_no_rules(require: str) -> None:
    assert n_needed(require, 4) is None
