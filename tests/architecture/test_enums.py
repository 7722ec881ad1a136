"""Every value of an enumeration has one name: who branches on it must not get a neighbour's."""

import ast

from tests.architecture.source_tree import source_modules

ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
NOT_OURS = "tests/sglang/stand_ins/"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_enumerations_are_unique() -> None:
    offenders = [
        f"{module}:{node.lineno} {node.name} is not @unique"
        for module in source_modules()
        if not str(module).startswith(NOT_OURS)
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        and any(_last_name(base) in ENUMS for base in node.bases)
        and "unique" not in map(_last_name, node.decorator_list)
    ]
    assert not offenders
