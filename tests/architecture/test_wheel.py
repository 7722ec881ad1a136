"""What is shipped is text and nothing else, and none of it can run what a peer sent."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.architecture.test_no_unsafe_code import UNSAFE_SNIPPETS, unsafe_uses

BUILD = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
BYPRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info")
TEXT = {".py", ".typed", ".html"}
PICKLES_ON_PURPOSE: frozenset[str] = frozenset()
"""Modules that make pickles of checked values for an engine that takes nothing else; none reads."""
BUILD_S = 120


def _packages() -> Iterator[Path]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        yield ROOT / pattern.removesuffix("*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in _packages():
        shutil.copytree(package, copy / package.name, ignore=BYPRODUCTS)
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    with zipfile.ZipFile(next((copy / "dist").glob("*.whl"))) as archive:
        yield archive


def _unsafe_in(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Module -> what is unsafe there."""
    found: dict[str, list[str]] = {}
    for name in _modules(wheel):
        uses = list(unsafe_uses(ast.parse(wheel.read(name), name)))
        if uses and name not in PICKLES_ON_PURPOSE:
            found[name] = uses
    return found


def _modules(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith(".py")]


@pytest.mark.timeout(180)
def test_the_wheel_holds_no_unsafe_code(wheel: zipfile.ZipFile) -> None:
    assert _unsafe_in(wheel) == {}
    names = _modules(wheel)
    assert len(names) > 100, "the packages are missing"
    for package in _packages():
        assert f"{package.name}/__init__.py" in names


@pytest.mark.timeout(180)
@pytest.mark.parametrize("snippet", UNSAFE_SNIPPETS)
def test_one_unsafe_line_in_any_module_of_the_wheel_is_found(
    wheel: zipfile.ZipFile, tmp_path: Path, snippet: str
) -> None:
    victim = "router/core.py"
    path = tmp_path / "planted.whl"
    with zipfile.ZipFile(path, "w") as copy:
        for name in (victim, "bus/codec.py"):
            text = wheel.read(name).decode()
            copy.writestr(name, f"{text}\n{snippet}\n" if name == victim else text)
    with zipfile.ZipFile(path) as planted:
        assert list(_unsafe_in(planted)) == [victim]


@pytest.mark.timeout(180)
def test_the_wheel_holds_no_files_but_text(wheel: zipfile.ZipFile) -> None:
    shipped = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {Path(name).suffix for name in shipped} <= TEXT
    assert not [name for name in shipped if name.startswith(("tests/", "benchmarks/", "docs/"))]
