"""What is shipped holds Python text and nothing else, and none of it can run what a peer sent."""

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
from tests.architecture.test_no_unsafe_code import unsafe_uses

BUILD = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
BYPRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info")
TEXT = {".py", ".typed"}
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


@pytest.mark.timeout(180)
def test_the_wheel_holds_no_unsafe_code(wheel: zipfile.ZipFile) -> None:
    found: dict[str, list[str]] = {}
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    for name in names:
        uses = list(unsafe_uses(ast.parse(wheel.read(name), name)))
        if uses and name not in PICKLES_ON_PURPOSE:
            found[name] = uses
    assert found == {}
    assert len(names) > 100, "the packages are missing"


@pytest.mark.timeout(180)
def test_the_wheel_holds_no_files_but_text(wheel: zipfile.ZipFile) -> None:
    shipped = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {Path(name).suffix for name in shipped} <= TEXT
    assert not [name for name in shipped if name.startswith(("tests/", "benchmarks/", "docs/"))]
