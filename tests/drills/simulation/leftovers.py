"""What must be forgotten when everybody has been answered: nothing leaks.

Everything that a core holds is looked through, whatever it is called: a request that is over may
be named only where the product promises to remember it for a while.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from tests.drills.simulation.detached import kept_twice

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

OURS = ("rolloutbus.",)
REMEMBERED = {
    "tombstones": "executions that are over, for 10 min",
    "suspicions": "suspects, for 10 min",
    "_suspicions": "the same, as the isolation lane asks for them",
    "crashes": "what ran when an engine died, for 10 min",
    "_done": "answered commands, for 1 min",
    "_collected": "detached requests whose endings were acknowledged, for 1 min",
    "over": "the latest detached requests that have ended for their callers, for 1 h",
    "settled": "the same, at a worker",
    "_over": "the same, at their client",
    "_ended": "the latest requests of a client that have ended, to tell them from unknown ones",
    "released": "detached requests that were given up, at most as many as may be open",
    "_answered": "answered publications, for 1 min",
    "_heap": "duties that were cancelled, until their time or 1024 of them",
    "_deadlines": "deadlines of requests that are over, until their time",
}
"""Name of what may still name a request -> why."""
DULL = frozenset({int, float, bool, bytes, bytearray, type(None)})
MAX_ITEMS = 64
"""In anything else; there are ten processes, and a hundred connections in a run."""


def leftovers(world: "World") -> Iterator[str]:
    """What is left, one line each."""
    excused = kept_twice(world)
    processes = [world.router, *world.workers.values(), *world.clients.values()]
    for process in processes:
        found, sizes = Counter[str](), Counter[str]()
        for path, thing in _things(process.core):
            if not isinstance(thing, str):
                sizes[path] += 1
            elif thing.startswith("c") and _is_rid(thing) and thing not in excused:
                found[path] += 1
        for path, count in sorted(found.items()):
            yield f"{process.name}: {count} requests are named in {path}"
        for path, count in sorted(sizes.items()):
            if count > MAX_ITEMS:
                yield f"{process.name}: {count} items in {path}"
    for member in world.router.core.context.members:
        if member.outstanding_cost:
            yield f"router: {member.name} is charged with {member.outstanding_cost} tokens"


def _is_rid(text: str) -> bool:
    return text.partition("/")[2].isdecimal()


def _things(root: object) -> Iterator[tuple[str, object]]:
    """(path, thing) of everything that can be reached; a collection's items share its path."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("core", root)]
    while waiting:
        path, thing = waiting.pop()
        if isinstance(thing, str):
            yield path, thing
        elif id(thing) not in seen:
            seen.add(id(thing))
            yield path, thing
            waiting += _parts(path, thing)


def _parts(path: str, thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, dict):
        table = cast("dict[object, object]", thing)
        return [(path, item) for item in (*table, *table.values()) if type(item) not in DULL]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        items = cast("Iterable[object]", thing)
        return [(path, item) for item in items if type(item) not in DULL]
    if not type(thing).__module__.startswith(OURS):
        return []
    parts = {name: getattr(thing, name, None) for name in _slots(type(thing))}
    parts.update(getattr(thing, "__dict__", {}))
    return [
        (f"{path}.{name}", part)
        for name, part in parts.items()
        if type(part) not in DULL and name not in REMEMBERED
    ]


@lru_cache(maxsize=1000)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple({name: None for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())})
