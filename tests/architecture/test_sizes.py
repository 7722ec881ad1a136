"""Ceilings on the size of modules, functions, classes and parameter lists."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, source_modules

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_CLASS_LINES = 250
MAX_PUBLIC_METHODS = 12
MAX_PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = pytest.mark.parametrize("module", source_modules(), ids=str)


def _functions(module: Module) -> Iterator[Function]:
    return (node for node in ast.walk(module.tree) if isinstance(node, Function))


def _classes(module: Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _n_lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _n_docstring_lines(node: Function) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    docstring = node.body[0]
    return (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1


def _n_parameters(function: Function) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if names and names[0] in {"self", "cls"}:
        names = names[1:]
    return len(names) + len(arguments.kwonlyargs)


def _is_command(function: Function) -> bool:
    """Whether it is a command of the command line: its parameters are options, listed by --help."""
    return any(
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr in {"command", "callback"}
        for decorator in function.decorator_list
    )


def _public_methods(node: ast.ClassDef) -> set[str]:
    return {
        each.name
        for each in node.body
        if isinstance(each, Function) and not each.name.startswith("_")
    }


@MODULES
def test_modules_are_short(module: Module) -> None:
    assert module.n_lines <= MAX_MODULE_LINES


@MODULES
def test_functions_are_short_without_their_docstring(module: Module) -> None:
    too_long = {
        f"{module}:{function.lineno} {function.name}": n_lines
        for function in _functions(module)
        if (n_lines := _n_lines(function) - _n_docstring_lines(function)) > MAX_FUNCTION_LINES
    }
    assert too_long == {}


@MODULES
def test_functions_take_few_parameters(module: Module) -> None:
    too_many = {
        f"{module}:{function.lineno} {function.name}": n_parameters
        for function in _functions(module)
        if (n_parameters := _n_parameters(function)) > MAX_PARAMETERS and not _is_command(function)
    }
    assert too_many == {}


@MODULES
def test_classes_are_short(module: Module) -> None:
    too_long = {
        f"{module}:{node.lineno} {node.name}": n_lines
        for node in _classes(module)
        if (n_lines := _n_lines(node)) > MAX_CLASS_LINES
    }
    assert too_long == {}


@MODULES
def test_classes_have_few_public_methods(module: Module) -> None:
    too_many = {
        f"{module}:{node.lineno} {node.name}": sorted(methods)
        for node in _classes(module)
        if len(methods := _public_methods(node)) > MAX_PUBLIC_METHODS
    }
    assert too_many == {}
