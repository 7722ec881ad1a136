"""How much a core remembers: every collection reachable from it, with its length."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import cast

OURS = ("rolloutbus.",)
PLAIN = (str, bytes, bytearray, memoryview, int, float, type(None))


def sizes(core: object) -> dict[str, int]:
    """Path from the core -> length, of each dict, set, list and deque below it."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("core", core)]
    while todo:
        path, each = todo.pop()
        if isinstance(each, PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict | set | frozenset | list | tuple | deque):
            items = _items(cast("Collection[object]", each))
            found[path] = max(found.get(path, 0), len(cast("Sized", each)))
            todo += [(f"{path}[]", item) for item in items]
        elif type(each).__module__.startswith(OURS):
            todo += [(f"{path}.{name}", value) for name, value in _attributes(each)]
    return found


def largest(core: object) -> tuple[int, str]:
    """(length, path) of the largest of them."""
    return max((size, path) for path, size in sizes(core).items())


def _items(collection: Collection[object]) -> list[object]:
    if isinstance(collection, Mapping):
        mapping = cast("Mapping[object, object]", collection)
        return [*mapping.keys(), *mapping.values()]
    return list(collection)


def _attributes(owner: object) -> Iterator[tuple[str, object]]:
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        for name in cast("tuple[str, ...]", getattr(kind, "__slots__", ())):
            if hasattr(owner, name):
                yield name, getattr(owner, name)
