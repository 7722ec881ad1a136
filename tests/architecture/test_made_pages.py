"""Pages that are made from the code are current, and each code of an error says what to do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolloutbus
from docs import list_commands, list_engine_options, list_errors, list_supported, list_surface
from docs.site_pages import with_links_of_site
from rolloutbus.bus.wire.problem_codes import CODES, LOCAL_CODES
from tests.architecture.source_tree import ROOT, Module, source_modules

PAGES = {
    module.PAGE: module.page
    for module in (
        *(list_commands, list_engine_options, list_errors),
        *(list_supported, list_surface),
    )
}
API = ROOT / "docs" / "reference" / "api.md"
ROUTERS = "refusal"
"""The router's function whose first argument is a code; others of that name have none."""


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_is_what_the_code_says(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == PAGES[file](), "run `make docs`"


def test_every_code_that_the_source_names_is_in_the_list() -> None:
    found = {code: str(module) for module in source_modules() for code in _codes_in(module)}

    assert set(found) - set(CODES) - set(LOCAL_CODES) == set()
    assert set(CODES) - set(found) == set(), "nobody says these any more"


def test_every_code_says_what_to_do() -> None:
    for name, advice in {name: code.advice for name, code in CODES.items()}.items():
        assert advice.endswith("."), name
        assert advice[0].isupper(), name


def test_the_page_of_the_api_has_every_public_name() -> None:
    listed = re.findall(r"^::: rolloutbus\.(\w+)$", API.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted([*listed, "__version__"]) == sorted(rolloutbus.__all__)


def _codes_in(module: Module) -> Iterator[str]:
    makers = {"Problem"} | ({ROUTERS} if module.package == "router" else set[str]())
    if module.package == "tests" or not any(f"{each}(" in module.text for each in makers):
        return
    constants = {
        target.id: node.value.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.nodes:
        for value in _values_of_codes(node, makers):
            for each in ast.walk(value):
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value:
                    yield each.value
                elif isinstance(each, ast.Name) and isinstance(constants.get(each.id), str):
                    yield str(constants[each.id])


def _values_of_codes(node: ast.AST, makers: set[str]) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in makers:
            yield from node.args[:1]
            yield from (each.value for each in node.keywords if each.arg == "code")
        case ast.Assign(targets=[ast.Name(id="code")], value=ast.IfExp() as value):
            yield from (value.body, value.orelse)
        case _:
            pass


@pytest.mark.parametrize(
    ("text", "folder", "wanted"),
    [
        ("[a](docs/client.md)", ".", "[a](client.md)"),
        ("![p](docs/pictures/top.png)", ".", "![p](pictures/top.png)"),
        ("[c](CONTRIBUTING.md)", ".", "[c](contributing.md)"),
        ("[a](docs/client.md#batches)", ".", "[a](client.md#batches)"),
        ("[s](examples/demo.py)", ".", "s"),
        ("[w](https://example.org/docs/)", ".", "[w](https://example.org/docs/)"),
        ("[r](../../README.md#install)", "docs/tutorial", "[r](../index.md#install)"),
        ("[l](log.md)", "docs", "[l](log.md)"),
        ("[e](../engine.md)", "docs/adapters", "[e](../engine.md)"),
        ("[h](#here)", "docs", "[h](#here)"),
    ],
)
def test_links_lead_to_the_same_page_on_a_code_host_and_in_the_site(
    text: str, folder: str, wanted: str
) -> None:
    assert with_links_of_site(text, folder) == wanted
