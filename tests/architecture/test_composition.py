"""Engines are put together from parts: none inherits what it can do."""

import ast

from tests.architecture.source_tree import source_modules

COMPOSED = {"engine_worker"}


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def test_no_class_of_an_engine_worker_inherits_from_another() -> None:
    classes = {
        node.name: (module, node)
        for module in source_modules()
        if module.package in COMPOSED
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    offenders = [
        f"{module}:{node.lineno} {name} inherits from {base}"
        for name, (module, node) in classes.items()
        for base in _bases(node)
        if base in classes and "Protocol" not in _bases(classes[base][1])
    ]
    assert offenders == []
