"""What docs/engine.md says is shown on a real engine is shown by a test, and by no fake one."""

import ast
import re

import pytest

from docs.list_surface import Item, Shown, shown, surface, table
from tests.architecture.source_tree import ROOT

ITEMS = surface().items
REAL_MODEL = re.compile(
    r"\b(?:tiny_models?|REAL_ENGINES|FLEET|reciting_model|build_tiny_model|speaking_model)\b"
)
"""Of a module that has a model which somebody really runs."""
PLAYED = re.compile(r'\bRouterPort\b|\bscripted_fleet\b|engines\.fake\b|\bengine"?\s*[:=]\s*"fake"')
"""Of what has the fake engine, or plays a router or a worker."""


def test_every_mark_names_an_item() -> None:
    unknown = {each.item: f"{each.file}::{each.test}" for each in shown() if each.item not in ITEMS}

    assert unknown == {}, "docs/engine_surface.toml has no such item"


def test_what_is_claimed_as_shown_has_a_mark_and_what_is_not_says_why() -> None:
    marked = {each.item for each in shown()}
    claimed = {name for name, item in ITEMS.items() if not item.not_shown}

    assert claimed - marked == set(), "mark a test that shows it, or say `not_shown` and why"
    assert marked - claimed == set(), "a test shows it: take `not_shown` away"


def test_what_has_no_call_here_says_why() -> None:
    assert [name for name, item in ITEMS.items() if not (item.call or item.not_shown)] == []


def test_marks_stand_where_a_real_engine_runs() -> None:
    marks = [each for each in shown() if each.engine == "transformers"]
    assert len(marks) > 100
    for file, test in {(each.file, each.test) for each in marks}:
        text = (ROOT / file).read_text(encoding="utf-8")
        has_model = REAL_MODEL.search(text) or "tests/unit" in str(file) or "adapters" in str(file)
        assert has_model, f"{file}: no model runs there"
        found = PLAYED.search(behind(test, text))
        assert not found, f"{file}::{test} has a part of the fleet that is played: {found}"


def behind(test: str, text: str) -> str:
    """The source of a test and of all in its module that it names, `FLEET` included."""
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [getattr(node, "name", ""), *(getattr(each, "id", "") for each in targets)]
        parts |= dict.fromkeys(filter(None, names), node)
    sources: dict[str, str] = {}
    ahead = [test, "FLEET"]
    while ahead:
        name = ahead.pop()
        if name in parts and name not in sources:
            sources[name] = ast.unparse(parts[name]).replace("'", '"')
            ahead += re.findall(r"\w+", sources[name])
    return "\n".join(sources.values())


@pytest.mark.parametrize(
    ("text", "is_played"),
    [
        ('FLEET = {"engine": "fake"}\ndef test_it(client): ...', True),
        ('def fleet():\n    return up(engine="fake")\ndef test_it(fleet): ...', True),
        ('def other():\n    return up(engine="fake")\ndef test_it(fleet): ...', False),
    ],
    ids=["its fleet", "a fixture of its module", "somebody else's"],
)
def test_a_fake_engine_is_found_behind_a_test(text: str, is_played: bool) -> None:
    assert bool(PLAYED.search(behind("test_it", text))) is is_played


def test_marks_on_a_gpu_stand_where_an_engine_is() -> None:
    files = {each.file.stem for each in shown() if each.engine == "gpu"}

    assert {each for each in files if not each.startswith("test_sglang")} <= {"test_gpu_fleet"}


def test_a_name_that_is_not_shown_stands_in_the_table_with_its_reason() -> None:
    known = surface()
    item = Item("`nowhere()`", "other", "there is no such engine")
    known.group[:] = [type(known.group[0])("One", {"nothing": item, "something": Item("`it()`")})]
    mark = Shown("something", "sglang", ROOT / "tests/sglang/test_it.py", "test_x", "0.5.23")

    made = table(known, [mark])

    assert made.startswith("2 names, 1 of them shown on a real engine.")
    told = "| `nothing` | `nowhere()` |  |  |  | other; not shown: there is no such engine |"
    assert told in made.splitlines()
    assert "| `something` | `it()` | `test_it` (0.5.23) |  |  |  |" in made.splitlines()
