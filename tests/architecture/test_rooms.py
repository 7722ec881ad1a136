"""Rooms stay small enough to be seen at once, and no two modules need each other."""

from collections import Counter
from collections.abc import Iterator

from tests.architecture.source_tree import LINKED, PUBLIC, imported_modules, source_modules

MAX_MODULES = 20
"""In one folder, its `__init__` included, those of folders below it not."""
SHIPPED = {*LINKED, PUBLIC}


def _cycles(needs: dict[str, set[str]]) -> Iterator[list[str]]:
    """Modules that are left when nothing that needs no other is taken away any more."""
    left = {name: set(others) for name, others in needs.items()}
    while done := [name for name, others in left.items() if not others]:
        for name in done:
            del left[name]
        for others in left.values():
            others.difference_update(done)
    while unneeded := set(left) - set().union(*left.values()):
        for name in unneeded:
            del left[name]
    if left:
        yield sorted(left)


def test_no_folder_holds_more_modules_than_one_sees_at_once() -> None:
    counts = Counter(module.path.parent for module in source_modules() if module.package in SHIPPED)
    assert {str(folder): n for folder, n in counts.items() if n > MAX_MODULES} == {}


def test_no_modules_import_each_other_not_even_for_their_types() -> None:
    needs = {
        module.name: {other.name for other in imported_modules(module)} - {module.name}
        for module in source_modules()
        if module.package in SHIPPED
    }
    assert list(_cycles(needs)) == []
