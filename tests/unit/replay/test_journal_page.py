"""docs/journal.md and the code name the same kinds of records with the same fields, in order."""

import re
from typing import get_args

import msgspec
import pytest

from rolloutbus.replay.journal.format import FORMAT, SIGNATURE
from rolloutbus.replay.journal.records import KINDS, Record
from tests.architecture.source_tree import ROOT

TEXT = (ROOT / "docs/journal.md").read_text(encoding="utf-8")
COMMON = ["seq", "at_ns"]


def documented() -> dict[str, list[str]]:
    """Kind -> its fields, as the page has them."""
    sections = re.split(r"^### `([a-z]+)`$", TEXT, flags=re.MULTILINE)
    return {
        kind: re.findall(r"^\| `([a-z_]+)` \|", body.partition("\n## ")[0], re.MULTILINE)
        for kind, body in zip(sections[1::2], sections[2::2], strict=True)
    }


def test_the_page_has_every_kind_of_record_and_no_other() -> None:
    assert set(documented()) == KINDS


@pytest.mark.parametrize("record", get_args(Record), ids=lambda each: each.__name__)
def test_the_page_has_every_field_in_its_place(record: type[msgspec.Struct]) -> None:
    fields = [field.encode_name for field in msgspec.structs.fields(record)]
    tag = record.__struct_config__.tag
    assert [*COMMON, *documented()[str(tag)]] == fields


def test_the_page_names_signature_and_format() -> None:
    assert f'%xB2 "{SIGNATURE[1:-1].decode()}"' in TEXT
    assert f"Format: **{FORMAT}**" in TEXT
