"""docs/protocol.md and the code name the same messages with the same fields; each has a vector.

The document describes a body under a heading that holds nothing but its name: ``### `abort` ``, or
several names when they share one body: ``### `failed`, `expired`, `refused` ``. What a command
returns is named ``#### `finished.abort` ``. Fields are the first column of the tables whose header
starts with `field`, up to the next heading. Structs inside of bodies have headings in plain words.
"""

import re

import msgspec
import pytest

from rolloutbus.bus.wire.commands import KINDS, RESULTS
from tests.architecture.source_tree import ROOT

DOCUMENT = ROOT / "docs/protocol.md"
VECTORS = ROOT / "tests/conformance/vectors"
NAMES_HEADING = re.compile(r"#{3,4} `[^`]+`(, `[^`]+`)*\s*")
# Kinds whose body depends on the command that they end; `finished.<command>` describes it.
ENDINGS_WITH_RESULT = {"finished", "cancelled"}
ANY_HEADING = re.compile(r"#{1,6} ")


def _first_cell(line: str) -> str:
    return line.strip().strip("|").split("|")[0].strip().strip("`")


def _documented(text: str) -> dict[str, list[str]]:
    """Name of a body -> its fields, as the document has them."""
    fields_by_name: dict[str, list[str]] = {}
    names: list[str] = []
    in_fields = False
    is_code = False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if is_code:
            continue
        if ANY_HEADING.match(line):
            names = re.findall(r"`([^`]+)`", line) if NAMES_HEADING.fullmatch(line) else []
            twice = fields_by_name.keys() & set(names)
            assert not twice, f"described twice: {sorted(twice)}"
            fields_by_name.update({name: [] for name in names})
        is_row = line.lstrip().startswith("|")
        cell = _first_cell(line) if is_row else ""
        if in_fields and cell.strip(":- "):
            for name in names:
                fields_by_name[name].append(cell)
        in_fields = is_row and (in_fields or cell.lower() == "field")
    return fields_by_name


def _document() -> dict[str, list[str]]:
    return _documented(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT.exists() else {}


BODIES: dict[str, type[msgspec.Struct]] = {
    **KINDS,
    **{f"finished.{command}": body for command, body in RESULTS.items()},
}


def test_document_and_code_name_the_same_messages() -> None:
    assert set(_document()) == set(BODIES) | ENDINGS_WITH_RESULT


@pytest.mark.parametrize("name", BODIES)
def test_document_has_every_field_of_the_message_and_no_other(name: str) -> None:
    fields = [field.encode_name for field in msgspec.structs.fields(BODIES[name])]
    assert sorted(_document().get(name, [])) == sorted(fields)


@pytest.mark.parametrize("name", BODIES)
def test_message_has_a_vector_of_hexadecimal_bytes(name: str) -> None:
    assert bytes.fromhex((VECTORS / f"{name}.hex").read_text(encoding="ascii"))


def test_fields_are_read_from_the_table_below_the_name() -> None:
    text = """
### `abort`
| field | type |
|---|---|
| `rids` | str[] |
| `everything` | bool |

| code | means |
|---|---|
| `x` | y |
#### Inside
| field | type |
|---|---|
| `other` | int |
### `drain`, `shutdown`
No fields.
#### `finished.abort`
| field | type |
|:--|:--|
| `n_aborted` | int |
"""
    assert _documented(text) == {
        "abort": ["rids", "everything"],
        "drain": [],
        "shutdown": [],
        "finished.abort": ["n_aborted"],
    }
