"""The source code as syntax trees, and which module imports which; nothing is executed."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = {"build", "dist", "docs", "runs"}
PUBLIC = "rolloutbus"
LINKED = frozenset(path.name for path in (ROOT / PUBLIC).iterdir() if path.is_symlink())
"""Folders of the repository that are shipped, as packages of `rolloutbus`."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    """Relative to the repository."""
    name: str
    """Dotted; a package's `__init__.py` has the package's name."""

    @cached_property
    def text(self) -> str:
        """What the file says."""
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when a test asks, once."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, in no order that means something."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The top-level folder it is in."""
        return self.path.parts[0]

    def __str__(self) -> str:
        return self.path.as_posix()


@dataclass(frozen=True)
class Import:
    """One imported name, absolute: `from a.b import c` is `a.b.c`."""

    name: str
    line: int
    is_top_level: bool
    """Executed when the module is imported, not when a function is called."""


@cache
def source_modules() -> tuple[Module, ...]:
    """Every Python file below a top-level folder of the repository."""
    folders = sorted(
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in NOT_SOURCE and path.name.isidentifier()
    )
    return tuple(_module(file) for folder in folders for file in sorted(folder.rglob("*.py")))


def _module(file: Path) -> Module:
    path = file.relative_to(ROOT)
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    if parts[0] in LINKED:
        parts = (PUBLIC, *parts)
    return Module(path, ".".join(parts))


def folder_of(name: str) -> str:
    """The top-level folder that a dotted name of ours is in; of others, the first name."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return second if first == PUBLIC and second in LINKED else first


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    """Every name that a module imports, wherever the statement stands."""
    return tuple(_imports_of(module))


def _imports_of(module: Module) -> Iterator[Import]:
    is_package = module.path.name == "__init__.py"
    at_the_top = set(map(id, _outside_of_functions(module.tree)))
    for node in module.nodes:
        is_top_level = id(node) in at_the_top
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_top_level)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module.name.split("."), is_package=is_package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, is_top_level)


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
        for each in ast.iter_child_nodes(node):
            yield from _outside_of_functions(each)


def _absolute(node: ast.ImportFrom, importer: list[str], *, is_package: bool) -> str:
    n_kept = len(importer) - node.level + is_package if node.level else 0
    return ".".join([*importer[:n_kept], *filter(None, [node.module])])


def imported_modules(module: Module) -> Iterator[Module]:
    """The modules of this repository that a module imports from."""
    modules_by_name = {each.name: each for each in source_modules()}
    for imported in imports_of(module):
        name = imported.name
        while name and name not in modules_by_name:
            name = name.rpartition(".")[0]
        if name:
            yield modules_by_name[name]
