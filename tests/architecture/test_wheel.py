"""What is shipped is text and nothing else, has one name, and cannot run what a peer sent."""

import ast
import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.architecture.source_tree import LINKED, PUBLIC, ROOT
from tests.architecture.test_no_unsafe_code import UNSAFE_SNIPPETS, unsafe_uses

BYPRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info")
TEXT = {".py", ".typed", ".html", ".js", ".css"}
PICKLES_ON_PURPOSE: frozenset[str] = frozenset()
"""Modules that make pickles of checked values for an engine that takes nothing else; none reads."""
COMMAND_S = 280
TAGGED = "9.8.7"
"""The release that the copy pretends to be."""
GIT_IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
]  # pip builds it, and a bare Python runs it


def _run(command: Sequence[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment or None,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _build(kind: str, tree: Path) -> Path:
    code = f"import setuptools.build_meta as b; b.build_{kind}('dist')"
    _run([sys.executable, "-c", code], tree)
    return next((tree / "dist").iterdir())


def _commit(tree: Path, tag: str = "") -> None:
    """Make a repository of all that is in a folder."""
    _run(["git", "init", "--quiet"], tree)
    _run(["git", "add", "."], tree)
    _run(["git", *GIT_IDENTITY, "commit", "--quiet", "--message", "all"], tree)
    if tag:
        _run(["git", "tag", tag], tree)


@pytest.fixture(scope="module")
def source_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a tagged copy, so that nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for folder in (PUBLIC, *LINKED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=BYPRODUCTS)
    _commit(copy, f"v{TAGGED}")
    return _build("sdist", copy)


@pytest.fixture(scope="module")
def wheel_file(source_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which has no history."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(source_file) as archive:
        archive.extractall(unpacked, filter="data")
    return _build("wheel", next(unpacked.iterdir()))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def _unsafe_in(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Module -> what is unsafe there."""
    found: dict[str, list[str]] = {}
    for name in _modules(wheel):
        uses = list(unsafe_uses([*ast.walk(ast.parse(wheel.read(name), name))]))
        if uses and name not in PICKLES_ON_PURPOSE:
            found[name] = uses
    return found


def _modules(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith(".py")]


def test_the_wheel_has_every_file_below_one_name(wheel: zipfile.ZipFile) -> None:
    shipped = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in shipped} == {PUBLIC}
    assert {Path(name).suffix for name in shipped} <= TEXT
    ours = {
        f"{PUBLIC}/{path.relative_to(ROOT).as_posix()}"
        for folder in LINKED
        for path in (ROOT / folder).rglob("*")
        if path.suffix in TEXT
    }
    assert ours <= set(shipped)


def test_the_source_distribution_holds_each_file_once(source_file: Path) -> None:
    with tarfile.open(source_file) as archive:
        names = [Path(name).parts[1:] for name in archive.getnames()]
    assert {parts[0] for parts in names if parts} == {
        *(PUBLIC, f"{PUBLIC}.egg-info"),
        *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"),
    }


def test_the_wheel_says_which_release_it_is_and_what_may_be_done_with_it(
    wheel: zipfile.ZipFile,
) -> None:
    [info] = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    told = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert (told["Name"], told["Version"]) == (PUBLIC, TAGGED)
    assert told["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert f"{PUBLIC}/py.typed" in wheel.namelist()
    assert told["Description-Content-Type"] == "text/markdown"
    classifiers = told.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    versions = {each.rpartition(" :: ")[2] for each in classifiers if ":: 3." in each}
    assert versions == {"3.11", "3.12", "3.13"}, "those of .ci/release-checks"
    assert told["Requires-Python"] == ">=3.11"


@pytest.mark.parametrize("has_history", [True, False])
def test_a_copy_without_tags_has_a_version_that_is_no_release(
    tmp_path: Path, has_history: bool
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if has_history:
        _commit(tmp_path)
    version = _run([sys.executable, "-m", "setuptools_scm"], tmp_path).strip()
    assert version.startswith("0.0."), version
    assert (".dev" in version) == has_history


def test_the_wheel_is_imported_where_folders_have_the_names_of_ours(
    wheel_file: Path, tmp_path: Path
) -> None:
    site, where = tmp_path / "site", tmp_path / "project"
    where.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(site)]
    _run([*pip, str(wheel_file)], tmp_path)
    (where / "router.py").write_text("raise RuntimeError('the wrong router')")
    for name in LINKED - {"router"}:
        (where / name).mkdir()
        (where / name / "__init__.py").write_text(f"raise RuntimeError('the wrong {name}')")
    code = "import rolloutbus; rolloutbus.connect, rolloutbus.up; print(rolloutbus.__file__)"
    found = _run([sys.executable, "-c", code], where, PYTHONPATH=str(site))
    assert Path(found.strip()) == site / PUBLIC / "__init__.py"
    command = [sys.executable, str(site / "bin" / PUBLIC), "--version"]
    assert PUBLIC in _run(command, where, PYTHONPATH=str(site))


def test_the_wheel_holds_no_unsafe_code(wheel: zipfile.ZipFile) -> None:
    assert _unsafe_in(wheel) == {}
    assert len(_modules(wheel)) > 100, "the packages are missing"


@pytest.mark.parametrize("snippet", UNSAFE_SNIPPETS)
def test_one_unsafe_line_in_any_module_of_the_wheel_is_found(
    wheel: zipfile.ZipFile, tmp_path: Path, snippet: str
) -> None:
    victim = "rolloutbus/router/core.py"
    path = tmp_path / "planted.whl"
    with zipfile.ZipFile(path, "w") as copy:
        for name in (victim, "rolloutbus/bus/wire/codec.py"):
            text = wheel.read(name).decode()
            copy.writestr(name, f"{text}\n{snippet}\n" if name == victim else text)
    with zipfile.ZipFile(path) as planted:
        assert list(_unsafe_in(planted)) == [victim]
