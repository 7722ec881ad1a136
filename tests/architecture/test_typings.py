"""The type checker is told of each name of a library where the library itself has it from."""

import ast
from importlib import import_module

from tests.architecture.source_tree import ROOT


def test_names_come_from_where_the_library_has_them() -> None:
    library = import_module("transformers")
    stub = ast.parse((ROOT / "typings/transformers/__init__.pyi").read_text())
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    told = {(str(each.module), name.name) for each in imports for name in each.names}
    assert told
    for module, name in told:
        assert getattr(import_module(module), name) is getattr(library, name), (module, name)
