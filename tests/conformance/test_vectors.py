"""Every kind has a vector, and our codec and a second MessagePack library agree on its bytes."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rolloutbus.bus.wire.codec import (
    SIGNATURE,
    decode_batch,
    encode_batch,
    pack,
    unpack,
    unpack_fleet,
    unpack_result,
)
from rolloutbus.bus.wire.commands import ENDINGS, KINDS, RESULTS
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.messages.endings import Done
from tests.conformance import plain
from tests.conformance.make_vectors import FOLDER, frame_of, hex_text
from tests.conformance.representatives import NAMES

OTHER_RESULTS = {"fleet", "push_chunk"}
"""What `finished` may end besides the commands of RESULTS."""
WITHOUT_BODY = {"cancelled.empty"}

VECTORS = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.hex")), ids=lambda path: path.stem)


def _frame(path: Path) -> bytes:
    return bytes.fromhex(path.read_text(encoding="ascii"))


def _typed_body(name: str, entry: Entry) -> msgspec.Struct:
    kind, _, command = name.partition(".")
    if not command:
        return unpack(entry)
    assert kind in ENDINGS
    if command == "fleet":
        return unpack_fleet(entry)
    if command == "push_chunk":
        return msgspec.msgpack.decode(entry.body, type=Done)
    return unpack_result(command, entry)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever MessagePack can hold
    """A struct or a container of structs as the maps and lists that the wire shows."""
    if isinstance(value, msgspec.Raw):
        return plain.read(bytes(value))
    if isinstance(value, msgspec.Struct):
        values = [_plain(getattr(value, name)) for name in value.__struct_fields__]
        is_positional = value.__struct_config__.array_like
        return (
            values
            if is_positional
            else dict(zip(value.__struct_encode_fields__, values, strict=True))
        )
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def test_every_kind_and_result_has_a_vector() -> None:
    wanted = {*KINDS, *(f"finished.{command}" for command in RESULTS), "cancelled.generate"}
    wanted |= {f"finished.{name}" for name in OTHER_RESULTS} | WITHOUT_BODY
    assert {path.stem for path in FOLDER.glob("*.hex")} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_vector_is_what_the_codec_writes_today(name: str) -> None:
    assert (FOLDER / f"{name}.hex").read_text(encoding="ascii") == hex_text(frame_of(NAMES[name]))


@VECTORS
def test_vector_decodes_and_encodes_to_the_same_bytes(path: Path) -> None:
    frame = _frame(path)
    (entry,) = decode_batch(frame)
    assert entry.kind == path.stem.partition(".")[0]
    assert encode_batch([entry]) == frame
    if path.stem not in WITHOUT_BODY:
        assert pack(_typed_body(path.stem, entry)) == entry.body


@VECTORS
def test_plain_msgpack_reads_the_same_header_and_body(path: Path) -> None:
    frame = _frame(path)
    assert frame[: len(SIGNATURE)] == SIGNATURE
    (header,) = plain.read(frame[len(SIGNATURE) :])
    (entry,) = decode_batch(frame)
    assert header == _plain(entry)
    body = header[Entry.__struct_fields__.index("body")]
    if path.stem in WITHOUT_BODY:
        assert body == {}
    else:
        # Equal to *all* fields: a representative that leaves one at its default fails here.
        assert body == _plain(_typed_body(path.stem, entry))


@VECTORS
def test_plain_msgpack_writes_the_same_bytes(path: Path) -> None:
    frame = _frame(path)
    assert SIGNATURE + plain.write(plain.read(frame[len(SIGNATURE) :])) == frame


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_BODY])
def test_body_is_a_map_that_refuses_unknown_fields(name: str) -> None:
    entry = NAMES[name]
    body = plain.read(bytes(entry.body))
    body["surprise"] = 1
    changed = msgspec.structs.replace(entry, body=msgspec.Raw(plain.write(body)))
    with pytest.raises(Exception, match="surprise"):
        _typed_body(name, changed)


def test_a_body_left_out_is_an_empty_map() -> None:
    assert bytes(Entry("resume").body) == bytes(NO_BODY) == plain.write({})
