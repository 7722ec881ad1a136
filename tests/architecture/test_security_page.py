"""docs/security.md: every threat names a test that exists."""

import ast
import re

import pytest

from tests.architecture.source_tree import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| (?P<threat>[^|]+) \| [^|]+ \| `(?P<path>tests/[^:`]+)::(?P<name>\w+)` \|")
ROWS = [line for line in PAGE.partition("## Threats")[2].splitlines() if line.startswith("| ")][1:]


def test_every_threat_has_a_row_with_a_test() -> None:
    assert len(ROWS) >= 30
    assert [row for row in ROWS if ROW.fullmatch(row) is None] == []


@pytest.mark.parametrize("row", ROWS)
def test_the_test_that_a_threat_names_exists(row: str) -> None:
    found = ROW.fullmatch(row)
    assert found is not None
    tree = ast.parse((ROOT / found["path"]).read_text(encoding="utf-8"))
    functions = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert found["name"] in functions
