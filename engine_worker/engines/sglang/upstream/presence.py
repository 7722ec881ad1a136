"""Whether the installed SGLang has what is used of it; it is imported for that, and not started."""

import ast
import importlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rolloutbus.engine_worker.engines.sglang.upstream.hooks import (
    PARTS,
    Hook,
    Lack,
    Part,
    Process,
    When,
)

PACKAGE = "sglang.srt"


def found(path: str) -> object | None:
    """What `module:Class.attribute` names below `sglang.srt`; None if this version lacks it.

    Raises:
        ImportError: the module is there and cannot be imported.
    """
    module, _, names = path.partition(":")
    try:
        value: object | None = importlib.import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and f"{PACKAGE}.{module}.".startswith(f"{error.name}."):
            if error.name == PACKAGE.partition(".")[0]:
                raise
            return None
        raise
    for name in names.split(".") if names else ():
        value = getattr(value, name, None)
    return value


def lacks_for(process: Process, whens: Collection[When] = ("always",)) -> list[Lack]:
    """What this process lacks of `PARTS`, where one of `whens` holds."""
    return [
        lack_of(part, f"there is no {path}")
        for part in PARTS
        if part.process == process and part.when in whens
        for path in lacking(part.owner, part.names)
    ]


def why_unfit(hook: Hook) -> str:
    """Why this hook cannot be used; empty: its target is there and takes what it relies on."""
    target = dotted(hook.target)
    if found(hook.target) is None:
        return f"there is no {target}"
    places = tuple(f"{place}:{name}" for place, name in enumerate(hook.takes))
    if lacking_parameters(hook.target, places):
        return f"{target} does not take ({', '.join(hook.takes)}) first"
    return ""


def lacks_among(unfit: Mapping[Hook, str]) -> list[Lack]:
    """What is lacking, by why each hook cannot be used; empty: it can."""
    groups = {hook.group for hook, why in unfit.items() if not why}
    return [
        lack_of(hook, why)
        for hook, why in unfit.items()
        if why and (hook.group not in groups or found(hook.target) is not None)
    ]


def lack_of(declared: Hook | Part, what: str) -> Lack:
    """A lack: `what` is wrong with something declared."""
    loses = None if declared.loses is None else list(declared.loses)
    return Lack(what, declared.carries, loses)


def lacks(owner: str, name: str) -> bool:
    """Whether `owner` ("module:Class", "module") has nothing of this name.

    What a class gives its objects counts: a field, an annotation, or an assignment to `self` in one
    of its methods.
    """
    held = found(owner)
    if held is None:
        return True
    if hasattr(held, name):
        return False
    return not isinstance(held, type) or name not in _of_objects(held)


def lacking(owner: str, names: Iterable[str]) -> list[str]:
    """Dotted paths of what is not there of `names`: `name`, or `name(parameter, other)`."""
    return [_path(owner, each) for each in names if _is_lacking(owner, each)]


def _is_lacking(owner: str, asked: str) -> bool:
    name, _, parameters = asked.rstrip(")").partition("(")
    if lacks(owner, name):
        return True
    path = _joined(owner, name)
    return bool(parameters) and bool(lacking_parameters(path, tuple(parameters.split(", "))))


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"


def _path(owner: str, name: str) -> str:
    return dotted(_joined(owner, name))


def dotted(path: str) -> str:
    """`module:Class.attribute` as Python writes it."""
    return f"{PACKAGE}.{path.replace(':', '.')}"


def lacking_parameters(path: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that the function does not take; all of them if it is not there.

    A name that begins with a number and a colon, "0:batch", is that of a parameter at this place,
    after `self`.
    """
    function = found(path)
    if not callable(function):
        return names
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return ()
    in_order = [name for name in parameters if name != "self"]
    return tuple(each for each in names if not _is_taken(each, in_order))


def _is_taken(asked: str, in_order: list[str]) -> bool:
    place, _, name = asked.rpartition(":")
    if not place:
        return name in in_order
    return in_order[int(place) : int(place) + 1] == [name]


def _of_objects(kind: type[object]) -> frozenset[str]:
    names: set[str] = set()
    for each in kind.__mro__:
        names |= getattr(each, "__annotations__", {}).keys()
        names |= _assigned_in(each.__module__).get(each.__qualname__, frozenset())
    return frozenset(names)


@cache
def _assigned_in(module: str) -> dict[str, frozenset[str]]:
    """By class of a module: the attributes that its methods give to `self`."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return {}
    tree = ast.parse(Path(file).read_text())
    classes = (each for each in tree.body if isinstance(each, ast.ClassDef))
    return {each.name: frozenset(_assigned(each)) for each in classes}


def _assigned(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def is_wrapped(path: str, original: object) -> bool:
    """Whether what is there now calls `original` from within a wrapper."""
    held: Any = found(path)
    if held is original:
        return False
    while held is not None and held is not original:
        held = getattr(held, "__wrapped__", None)
    return held is original
