"""Pages for people name files and symbols that exist: docs/architecture.md and CONTRIBUTING.md.

A path stands in backticks, `router/core.py`, a symbol after it: `router/core.py:RouterCore`,
`router/core.py:RouterCore.receive`. `RouterCore.receive` without a path may be in any file of ours.
What is in a block of code is a command, and is not looked at.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.source_tree import ROOT, source_modules

PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE_TYPES = "hex|ini|json|md|py|toml|txt|yaml"
REFERENCE = re.compile(
    rf"(?P<path>\.?\w[\w.-]*(?:/[\w.-]+)*(?:/|\.(?:{FILE_TYPES}))|\.?\w[\w.-]*(?:/[\w.-]+)+)"
    r"(?::(?P<symbol>\w+(?:\.\w+)*))?"
)

MEMBER = re.compile(r"[A-Z]\w*\.\w+")


def test_what_the_pages_name_exists() -> None:
    offenders = [
        f"{page}: {wrong}"
        for page in PAGES
        for wrong in _wrong_in((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert offenders == []


def test_wrong_references_are_found() -> None:
    right = [
        *("router/core.py:RouterCore.handle", "docs/", "README.md", "RouterCore.handle"),
        *("versions=any", "a message", "rolloutbus.router"),
    ]
    wrong = [
        *("router/gone.py", "gone/", "gone.md", "router/core.py:Gone", "RouterCore.gone"),
        "router/core.py:RouterCore.gone",
    ]
    page = ", ".join(f"`{each}`" for each in right + wrong)
    assert [each.partition(": ")[0] for each in _wrong_in(page)] == wrong


def _wrong_in(text: str) -> Iterator[str]:
    """Each reference to a file or a symbol that is not there."""
    for span in SPAN.findall(BLOCK.sub("", text)):
        if MEMBER.fullmatch(span) and not (ROOT / span).exists() and span not in _symbols():
            yield f"{span}: no file of ours has such a symbol"
        found = REFERENCE.fullmatch(span)
        if found is None:
            continue
        path = ROOT / found["path"]
        symbol = found["symbol"]
        if not path.exists():
            yield f"{span}: there is no such file"
        elif symbol is not None and symbol not in _symbols_of(path):
            yield f"{span}: the file has no such symbol"


@cache
def _symbols() -> frozenset[str]:
    return frozenset(symbol for module in source_modules() for symbol in _named_in(module.tree, ""))


@cache
def _symbols_of(path: Path) -> frozenset[str]:
    """What a module defines: `Class`, `Class.method`, `Class.field`, `function`, `CONSTANT`."""
    return frozenset(_named_in(ast.parse(path.read_text(encoding="utf-8")), ""))


def _named_in(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _named_in(statement, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + each.id for each in targets if isinstance(each, ast.Name))
            case _:
                pass
